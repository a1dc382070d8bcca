"""Trainings in processes of their own, to be killed.

Importing takes longer than training here, so this process imports once. For each line it reads, "RECIPE FOLDER
new|resume", it forks a child that trains; it says the child's number and, once that has ended, how.
"""

import os
import sys

import nearfar.training.recipe.files as recipes
from nearfar.training.trainer import Trainer


def train(recipe, folder, how):
    try:
        Trainer(recipes.load(recipe), folder, resume=how == "resume").run()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(train(*line.split()))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
