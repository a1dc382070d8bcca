"""Adds to an index in a process of its own, to be killed.

Importing takes longer than adding, so this process imports once. For each line it reads, it forks a child that says its
number, adds vectors until it is killed, and says the id of each change that was acknowledged; "end" is said after that.
"""

import os
import sys
from pathlib import Path

import numpy as np

from nearfar.search import Index


def vector_of(number):
    """A vector [1, 16] that tells its number."""
    return np.random.default_rng(number).standard_normal((1, 16)).astype(np.float32)


def say(word):
    os.write(1, f"{word}\n".encode())


def add(folder):
    with Index.open(folder, device="cpu") as index:
        say(os.getpid())
        number = max(item.id for item in index.items) + 1
        while True:
            number = index.add_vectors(vector_of(number), names=[str(number)])[0]
            say(number)
            if number % 40 == 17:
                index.remove([number - 7])
                say(f"-{number - 7}")
            if number % 20 == 5:
                index.compact()
            number += 1


if __name__ == "__main__":
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            add(Path(sys.argv[1]))
        os.waitpid(child, 0)
        say("end")
