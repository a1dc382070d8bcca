"""What processes do that share an evaluation.

Run as a script in every rank: FOLDER RECIPE. Trains the recipe into FOLDER/run, writes what it found to a file named
after its rank in FOLDER, and evaluates the run with the command line.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nearfar import networks
from nearfar.cli import main
from nearfar.data import Loader, Store, View
from nearfar.distributed import init_world
from nearfar.training.evaluation.embeddings import embed
from nearfar.training.recipe.files import load
from nearfar.training.trainer import Trainer
from nearfar.utils.preprocessing import Normalization

ITEMS = 61
BATCHES = (7, 30, 100)  # many batches; three; one, so that a process has none


class Counts(nn.Module):
    """A network that counts the images it embeds, and fails on request."""

    def __init__(self, *, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.network = networks.create("small_cnn", size=8, dim=8)
        self.seen, self.fails = 0, fails

    def forward(self, images):
        if self.fails:
            raise ValueError("no memory left")
        self.seen += len(images)
        return self.network(images)


def loader():
    """Random crops of random pictures."""
    pixels = np.random.default_rng(0).integers(0, 255, (ITEMS + 9, 12, 12), dtype=np.uint8)
    view = View(size=8, crop="random", flip=True)
    labels, normalization = np.arange(len(pixels)) % 5, Normalization(mean=(0.0,), std=(1.0,))
    return Loader(Store.of_arrays(pixels), labels, view=view, normalization=normalization, workers=0)


def embedded(world):
    """Embeddings, labels and rows, and the number of images that this process has embedded."""
    rows = np.random.default_rng(1).permutation(ITEMS + 9)[:ITEMS]
    found = {}
    for size in BATCHES:
        model = Counts()
        one = embed(model, loader(), rows, batch_size=size, crops=2, world=world)
        found |= {f"{size}.embeddings": one.embeddings, f"{size}.labels": torch.as_tensor(one.labels)}
        found |= {f"{size}.rows": one.rows, f"{size}.seen": torch.tensor(model.seen)}
    return found


def failure(world):
    """The error of embeddings that fail in the last process alone."""
    try:
        embed(Counts(fails=world.rank == world.ranks - 1), loader(), np.arange(ITEMS), batch_size=7, world=world)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, folder = init_world("cpu"), Path(sys.argv[1])
    found = {"embedded": embedded(here), "failure": failure(here)}
    found["metrics"] = Trainer(load(sys.argv[2]), folder / "run", world=here).run().metrics
    torch.save(found, folder / str(here.rank))
    main(["evaluate", str(folder / "run"), "--data", "digits", "--json", str(folder / "evaluated.json")])
