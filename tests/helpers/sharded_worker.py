"""What processes with sharded classes do, and what a single one does for comparison.

Run as a script in every rank: FOLDER RECIPE RUN new|resume STEP. Writes what it found to a file named after its rank in
FOLDER, then trains the recipe into RUN until the step, where it is stopped by a signal.
"""

import sys
from contextlib import closing, nullcontext
from pathlib import Path

import torch
from distributed_worker import DIM, FEATURES, batch, own_share
from training_runs import Interrupts

from nearfar import losses, networks
from nearfar.data.loader import Batch
from nearfar.distributed import init_world, shard_classes
from nearfar.training.recipe.files import load
from nearfar.training.step import Learner, TrainStep
from nearfar.training.trainer import Trainer

CLASSES, STEPS = 41, 4
CASES = {
    "softmax": ("softmax", {}),
    "normalized_softmax": ("normalized_softmax", {}),
    "normalized_softmax, sampled": ("normalized_softmax", {"sample_rate": 0.6}),
    "arcface": ("arcface", {}),
    "arcface, sub-centers, sampled": ("arcface", {"centers": 2, "sample_rate": 0.1}),
    "cosface": ("cosface", {}),
    "sphereface": ("sphereface", {}),
    "proxy_nca, euclidean": ("proxy_nca", {"measure": "euclidean"}),
    "proxy_anchor": ("proxy_anchor", {}),
    "soft_triple": ("soft_triple", {"centers": 3}),
    "soft_triple, sampled": ("soft_triple", {"centers": 3, "sample_rate": 0.6}),
}


def trained(there, name, settings, *, sharded):
    """Losses, parameters and optimizer state after a few clipped steps of Adam, in float64."""
    torch.manual_seed(1)
    model = networks.create("mlp", in_dim=FEATURES, hidden=(8,), dim=DIM).double()
    with torch.device("meta") if sharded else nullcontext():
        loss = losses.create(name, num_classes=CLASSES, dim=DIM, **settings)
    assert isinstance(loss, losses.ProxyLoss)
    if sharded:
        shard_classes(loss, world=there)
    loss.double()
    optimizer = torch.optim.Adam([{"params": model.parameters()}, *loss.param_groups(1e-3)], lr=1e-3)
    step = TrainStep([Learner(model, {"high": loss})], optimizer, world=there, clip=0.1)
    torch.manual_seed(100 + there.rank)  # what is drawn depends on the seed of the step alone
    values = []
    for number in range(STEPS):
        inputs, labels = own_share(there, *batch(number, torch.float64))
        result = step(Batch(inputs, labels * 9, labels), seed=number)
        assert result.finite
        values.append(result.loss)
    return {
        **model.state_dict(),
        "losses": torch.stack(values),
        "proxies": loss.proxies.detach(),
        "exp_avg": optimizer.state[loss.proxies]["exp_avg"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, recipe, run, how, step = sys.argv[1:]
    with closing(init_world("cpu")) as here:  # or its threads may abort the process when it exits
        found = {case: trained(here, *arguments, sharded=True) for case, arguments in CASES.items()}
        torch.save(found, Path(folder) / str(here.rank))
        display = Interrupts(int(step))
        Trainer(load(recipe), run, resume=how == "resume", world=here, display=display).run()
