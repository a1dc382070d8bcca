"""What the processes of the distributed tests do, and what a single one does for comparison.

Run as a script, with the environment ``torchrun`` gives: writes what it found to a file named after its rank in
the folder that is its argument.
"""

import sys

import cases
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nearfar import networks
from nearfar.data.loader import Batch
from nearfar.distributed import gather, global_loss, init_world
from nearfar.supervision import Hierarchy, Masks, MultiLabel, Pairs, Supervision, Triplets
from nearfar.training.step import Learner, TrainStep

ROWS, FEATURES, DIM, STEPS = 24, 6, 4, 10
SHARED = ("raw", "normalized_softmax", "proxy_anchor", "group")  # in every mode
TRAINED = ("multi_similarity", "contrastive", "triplet", "proxy_anchor", "normalized_softmax", "group")


def batch(step, dtype=torch.float32):
    """A global batch: inputs, and labels of six classes of four."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.arange(6).repeat_interleave(4)[torch.randperm(ROWS, generator=generator)]
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=dtype)
    return inputs + labels.unsqueeze(1) * 0.3, labels % 5


def network(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, DIM)).to(dtype)


def own_share(there, *tensors):
    return [tensor.chunk(there.ranks)[there.rank] for tensor in tensors]


SUPERVISIONS = ("pairs", "pairs_and_others", "graded_pairs", "triplets", "masks", "multi_label", "hierarchy")
SUPERVISED = (  # shared by columns, and whole
    cases.Case("raw", {}),
    cases.Case("contrastive", {"average": "pairs"}),
    cases.Case("triplet", {"mining": "all"}),
    cases.Case("cosent", {"scale": 3.0, "graded": True}),
)


def supervision(there, kind):
    """The part of a process in a supervision of the global batch; pairs and triplets are within quarters of it."""
    labels, generator = batch(0)[1], torch.Generator().manual_seed(3)
    start, count = there.rank * ROWS // there.ranks, ROWS // there.ranks
    if kind == "multi_label":
        return MultiLabel(*own_share(there, torch.rand(ROWS, 4, generator=generator) < 0.3))
    if kind == "hierarchy":
        return Hierarchy(own_share(there, labels % 2, labels), weights=(0.3, 1.0))
    if kind == "masks":
        near, known = (torch.rand(ROWS, ROWS, generator=generator) < 0.5 for _ in range(2))
        return Masks(*own_share(there, near & known, ~near & known))
    quarter, width = torch.arange(4).repeat_interleave(7) * (ROWS // 4), ROWS // 4
    first = torch.randint(width, (28,), generator=generator)
    second, third = ((first + step) % width for step in (1, 3))
    own = (quarter >= start) & (quarter < start + count)
    parts = [(part + quarter - start)[own] for part in (first, second, third)]
    if kind == "triplets":
        return Triplets(*parts)
    kept = (torch.rand(28, generator=generator) < 0.7)[own]  # each process has another number of pairs
    left, right = torch.cat([parts[0], parts[0][kept]]), torch.cat([parts[1], parts[2][kept]])
    same = torch.arange(len(left)) < len(parts[0])
    if kind == "graded_pairs":
        grades = torch.rand(2, 28, generator=generator)[:, own]
        return Pairs(left, right, same, grades=torch.cat([grades[0], grades[1][kept]]))
    return Pairs(left, right, same, others="negative" if kind == "pairs_and_others" else "unknown")


def supervised(there, kind, case):
    """Value and gradients of a step with a supervision other than labels."""
    model = Model(case.create(dim=DIM))
    (inputs,) = own_share(there, batch(0, torch.float64)[0])
    value = model(inputs, supervision(there, kind))
    value.backward()
    there.average_gradients(model.parameters())
    return {"value": value.detach()} | {key: each.grad for key, each in model.named_parameters()}


class Model(nn.Module):
    """A network and its loss, as someone would wrap them in DistributedDataParallel."""

    def __init__(self, loss):
        super().__init__()
        self.network, self.loss = network(torch.float64), loss.double()

    def forward(self, inputs, labels):
        return global_loss(self.loss, self.network(inputs), labels, seed=0)


class GatheringModel(Model):
    """Computes the loss of all embeddings in every process."""

    def forward(self, inputs, labels):
        embeddings, labels = gather(self.network(inputs)), gather(labels)
        torch.manual_seed(0)
        return self.loss(embeddings, labels)


def gradients(there, case, kind=Model, *, ddp=False):
    """Value and gradients of one step of a case, in float64 so that only what is wrong differs."""
    model = kind(case.create(dim=DIM))
    wrapped = DistributedDataParallel(model) if ddp else model  # kept: its hooks run in the backward pass
    value = wrapped(*own_share(there, *batch(0, torch.float64)))
    value.backward()
    if not ddp:
        there.average_gradients(model.parameters())
    found = {"value": value.detach()}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[key] = parameter.grad
    return found


class Unknown(Supervision):
    def of_batch(self, rows, columns, device):
        raise NotImplementedError

    masks = of_batch


def refused(there):
    """Errors of calls whose result would not be that of the global batch."""
    calls = {
        "rows": lambda: gather(torch.zeros(2 + there.rank, 1)),
        "share": lambda: global_loss(
            cases.create("softmax", {}), torch.zeros(2 + there.rank, 4), torch.zeros(2).long()
        ),
        "seed": lambda: global_loss(cases.create("group", {}), torch.zeros(2, 4), torch.tensor([0, 1])),
        "masks": lambda: global_loss(cases.create("raw", {}), torch.zeros(2, 4), Masks(torch.eye(2))),
        "pairs": lambda: global_loss(cases.create("raw", {}), torch.zeros(2, 4), Pairs(*torch.tensor([[0], [2]]))),
        "kind": lambda: global_loss(cases.create("raw", {}), torch.zeros(2, 4), Unknown()),
        "grades": lambda: global_loss(
            cases.create("cosent", {"graded": True}),
            torch.zeros(2, 4),
            Pairs(*torch.tensor([[0], [1]]), grades=torch.ones(1) if there.rank else None),
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def trained(there, key):
    """Parameters after ten steps of a loss."""
    model, loss = network(), cases.create(key, {}, dim=DIM)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, *loss.param_groups(0.0005)], lr=0.003, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, labels = own_share(there, *batch(step))
        global_loss(loss, model(inputs), labels, seed=step, world=there).backward()
        there.average_gradients([*model.parameters(), *loss.parameters()])
        optimizer.step()
    return {
        f"{number}.{key}": value
        for number, part in enumerate((model, loss))
        for key, value in part.state_dict().items()
    }


DRAWING = {"group": {}, "contrastive": {"mining": "random"}, "softmax": {"sample_rate": 0.5}}


def stepped(there, key):
    """Parameters after three steps of a loss that draws, with torch's generator at another place in every process."""
    torch.manual_seed(1)
    model = networks.create("mlp", in_dim=FEATURES, hidden=(8,), dim=DIM)
    loss = cases.create(key, DRAWING[key], dim=DIM)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.003)
    torch.manual_seed(100 + there.rank)
    step = TrainStep([Learner(model, {"high": loss})], optimizer, world=there)
    for number in range(3):
        inputs, labels = own_share(there, *batch(number))
        step(Batch(inputs, labels, labels), seed=number)
    return dict(model.state_dict())


def skipped(there):
    """What the batch norm of each process knows after a good step and one in which the last process is given a NaN."""
    torch.manual_seed(1)
    model = networks.create("mlp", in_dim=FEATURES, hidden=(8,), dim=DIM)
    model.heads["high"] = nn.Sequential(nn.BatchNorm1d(8), model.heads["high"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    step = TrainStep([Learner(model, {"high": cases.create("contrastive", {}, dim=DIM)})], optimizer, world=there)
    found = {}
    for name in ("before", "after"):
        inputs, labels = own_share(there, *batch(0))
        if name == "after" and there.rank == there.ranks - 1:
            inputs[0, 0] = torch.nan
        found[f"{name}.finite"] = step(Batch(inputs, labels, labels), seed=0).finite
        found[f"{name}.mean"] = model.heads["high"][0].running_mean.clone()
    return found


def other_words(there):
    """What processes say to each other beside gradients."""
    model = nn.BatchNorm1d(2)
    nn.init.constant_(model.weight, there.rank + 1.0)
    model.running_mean.fill_(there.rank + 1.0)
    there.broadcast(model)
    return {
        "weight": model.weight.tolist(),
        "mean": model.running_mean.tolist(),
        "any": there.any(there.rank == there.ranks - 1),
        "none": there.any(False),
        "said": there.share({"rank": there.rank}),
        "gathered": gather(torch.tensor([[there.rank], [10]])).flatten().tolist(),
    }


def everything(there):
    found = {"words": other_words(there), "refused": refused(there)}
    found["gradients"] = {case.id: gradients(there, case) for case in cases.CASES}
    found["supervised"] = {
        (kind, case.id): supervised(there, kind, case) for kind in SUPERVISIONS for case in SUPERVISED
    }
    found["gathered"] = {key: gradients(there, cases.Case(key), GatheringModel) for key in SHARED}
    # The first DistributedDataParallel imports torch's compiler: four seconds in every process.
    found["ddp"] = {key: gradients(there, cases.Case(key), ddp=True) for key in SHARED if there.ranks == 2}
    found["trained"] = {key: trained(there, key) for key in TRAINED}
    found["stepped"] = {key: stepped(there, key) for key in DRAWING}
    found["skipped"] = skipped(there)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = init_world("cpu")
    torch.save(everything(here), f"{sys.argv[1]}/{here.rank}")
    here.close()
