"""Samplers in torch's DataLoader: an epoch of lists each time, and labels of any kind."""

from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nearfar.data.sampling import create, fitting_classes, names

LABELS = torch.arange(60) % 12
DATA = TensorDataset(torch.arange(60), LABELS)
SETTINGS = {
    "groups": {"classes": 4, "per_class": 3},
    "pairs": {"classes": 6},
    "random": {"batch_size": 12},
    "hard_classes": {"classes": 6},
    "neighbor_classes": {"classes": 6, "anchors": 2},
    "importance": {"classes": 2, "batch_size": 12},
    "hard_triplets": {"batch_size": 12},
    "smart_triplets": {"batch_size": 12},
}


def epochs_of(sampler, *epochs):
    return [[batch.tolist() for batch in sampler.epoch(epoch)] for epoch in epochs]


@pytest.mark.parametrize("key", sorted(set(names()) - {"given"}))  # that draws given pairs, whatever the labels
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_goes_from_epoch_to_epoch(key, workers):
    sampler = create(key, LABELS, **SETTINGS[key])
    loader = DataLoader(DATA, batch_sampler=sampler.batches(), num_workers=workers, persistent_workers=workers > 0)
    assert len(loader) == len(sampler) == 5
    found = [[places.tolist() for places, _ in loader] for _ in range(3)]
    assert found == epochs_of(sampler, 0, 1, 2)
    assert found[0] != found[1]


def test_labels_come_along():
    sampler = create("groups", LABELS, classes=4, per_class=3)
    for places, labels in DataLoader(DATA, batch_sampler=sampler.batches()):
        assert labels.tolist() == LABELS[places].tolist()
        assert labels.unique(return_counts=True)[1].tolist() == [3] * 4


def test_batches_are_lists_of_plain_numbers():
    batch = next(iter(create("pairs", LABELS, classes=3).batches()))
    assert type(batch) is list
    assert {type(place) for place in batch} == {int}


def test_the_next_epoch_can_be_chosen():
    sampler = create("random", LABELS, batch_size=20)
    batches = sampler.batches(epoch=7)
    assert list(batches) == epochs_of(sampler, 7)[0]
    assert batches.epoch == 8
    batches.set_epoch(3)
    assert [list(batches), list(batches)] == epochs_of(sampler, 3, 4)


def test_an_epoch_counts_once_it_has_begun():
    sampler = create("random", LABELS, batch_size=20)
    batches = sampler.batches()
    iter(batches)  # asked for and not used, as a DataLoader with workers does
    first, second = epochs_of(sampler, 0, 1)
    assert list(islice(batches, 1)) == first[:1]  # left early
    assert list(batches) == second


def test_ranks_get_their_share():
    sampler = create("groups", LABELS, classes=4, per_class=3)
    first, second = (list(sampler.batches(rank=rank, ranks=2)) for rank in (0, 1))
    assert [left + right for left, right in zip(first, second, strict=True)] == list(sampler.batches())


def test_a_sampler_itself_says_what_a_data_loader_takes():
    sampler = create("groups", LABELS, classes=4, per_class=3)
    with pytest.raises(TypeError, match=r"a groups sampler has no current epoch.*sampler\.batches\(\)"):
        next(iter(DataLoader(DATA, batch_sampler=sampler)))


def test_epochs_are_checked():
    sampler = create("random", LABELS, batch_size=20)
    with pytest.raises(ValueError, match="epoch is -1"):
        sampler.batches(epoch=-1)
    with pytest.raises(TypeError, match=r"epoch is 1\.5"):
        sampler.batches().set_epoch(1.5)


# --- labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS.int(), LABELS.to(torch.uint8), LABELS.tolist(), tuple(LABELS.tolist()), LABELS.numpy()],
    ids=["int64", "int32", "uint8", "list", "tuple", "array"],
)
def test_labels_are_arrays_tensors_or_lists(labels):
    expected = create("groups", LABELS.numpy(), classes=4, per_class=3)
    sampler = create("groups", labels, classes=4, per_class=3)
    assert sampler.fingerprint() == expected.fingerprint()
    assert sampler.batch(0, 0).tolist() == expected.batch(0, 0).tolist()
    assert sampler.labels.dtype == np.int64
    assert fitting_classes(labels, batch_size=16, per_class=4) == 4


@pytest.mark.parametrize("labels", [LABELS.clone(), LABELS.numpy().copy()], ids=["tensor", "array"])
def test_labels_are_kept_as_they_were(labels):
    sampler = create("groups", labels, classes=4, per_class=3)
    labels[:] = 0
    assert sampler.labels.tolist() == LABELS.tolist()
