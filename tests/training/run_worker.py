"""A training in a process of its own, to be killed: python run_worker.py RECIPE FOLDER new|resume."""

from __future__ import annotations

import sys

from nearfar.training.recipe_file import load
from nearfar.training.trainer import Trainer

if __name__ == "__main__":
    recipe, folder, how = sys.argv[1:]
    trainer = Trainer(load(recipe), folder, resume=how == "resume")
    print("ready", flush=True)
    trainer.run()
    print("done", flush=True)
