"""A process that adds is killed without warning: nothing that it acknowledged is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from adding_worker import vector_of
from search_cases import vectors

from nearfar.search import Index

KILLS = int(os.environ.get("NEARFAR_KILLS", "10"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_lose_no_acknowledged_change(tmp_path):
    place = tmp_path / "i"
    Index.from_vectors(vectors(20), out=place).close()
    words = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "adding_worker.py"), str(place)]
    pause = random.Random(0)
    added = set(range(20))
    removed = set()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        for _ in range(KILLS):
            print("add", file=worker.stdin, flush=True)
            child = int(worker.stdout.readline())
            told = [worker.stdout.readline().strip()]
            time.sleep(pause.uniform(0.0, 0.25))
            os.kill(child, signal.SIGKILL)
            while (word := worker.stdout.readline().strip()) != "end":
                told.append(word)
            for word in told:
                (removed if word.startswith("-") else added).add(abs(int(word)))
            check(place, added, removed)
        worker.stdin.close()
    assert len(added) > 20 + KILLS


def check(place, added, removed):
    """That all is there; the one change that was on disk when the signal came may be there unacknowledged."""
    with Index.open(place, read_only=True) as index:
        there = {item.id for item in index.items}
        assert not removed & there
        lost = added - removed - there
        assert len(lost) <= 1
        assert all(id % 40 == 10 for id in lost)  # it was about to say that this one is removed
        assert len(there - added) <= 1 - len(lost)
        for id in sorted(there - set(range(20)))[-5:]:
            expected = vector_of(id)[0]
            assert index.item(id).name == str(id)
            np.testing.assert_allclose(index.vector(id), expected / np.linalg.norm(expected), atol=1e-6)
            assert index.search_vectors(vector_of(id), 1)[0][0].id == id
    added |= there
    removed |= lost
