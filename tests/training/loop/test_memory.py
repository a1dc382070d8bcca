"""Cross-batch memory: what is remembered, and for how long."""

import torch

from nearfar import losses
from nearfar.losses import Memory


def points(*numbers):
    return torch.tensor(numbers).unsqueeze(1).repeat(1, 2), torch.tensor(numbers).long()


def test_the_oldest_are_overwritten_first():
    memory = Memory(5, dim=2)
    for start in range(0, 12, 3):
        memory.add(*points(start, start + 1, start + 2))
    assert sorted(memory.labels.tolist()) == [7, 8, 9, 10, 11]
    assert torch.equal(memory.embeddings[:, 0].long(), memory.labels)


def test_only_what_is_there_is_compared_with():
    memory = Memory(5, dim=2)
    assert len(memory) == 0
    memory.add(*points(1, 2))
    assert len(memory) == 2
    assert memory.embeddings.shape == (2, 2)


def test_an_empty_memory_is_the_plain_loss():
    torch.manual_seed(0)
    embeddings, labels, loss = torch.randn(8, 2), torch.arange(8) // 2, losses.create("contrastive")
    assert torch.equal(Memory(4, dim=2).loss(loss, embeddings, labels), loss(embeddings, labels))


def test_of_a_batch_larger_than_the_memory_the_end_stays():
    memory = Memory(3, dim=2)
    memory.add(*points(0, 1, 2, 3, 4))
    assert sorted(memory.labels.tolist()) == [2, 3, 4]


def test_gradients_reach_the_batch_and_not_the_memory():
    torch.manual_seed(0)
    memory, labels = Memory(8, dim=2), torch.arange(8) // 2
    memory.add(torch.randn(8, 2, requires_grad=True), labels)
    embeddings = torch.randn(8, 2, requires_grad=True)
    memory.loss(losses.create("contrastive"), embeddings, labels).backward()
    assert bool(embeddings.grad.any())
    assert not memory.embeddings.requires_grad


def test_what_is_no_number_does_not_stay():
    memory = Memory(2, dim=2)
    memory.add(torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0]]), torch.tensor([0, 1]))
    assert bool(memory.embeddings.isfinite().all())
