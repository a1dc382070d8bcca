"""Cross-batch memory in a training of one's own: a module like any other. What it remembers: tests of training."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from nearfar import losses


def filled():
    memory = losses.Memory(5, dim=2)
    generator = torch.Generator().manual_seed(0)
    for start in (0, 4):
        memory.add(torch.randn(4, 2, generator=generator), torch.arange(start, start + 4))
    return memory


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    assert torch.equal(found.labels, wanted.labels)
    assert torch.equal(found.embeddings, wanted.embeddings)


def test_it_goes_on_from_its_state_dict_where_it_was():
    memory, other = filled(), losses.Memory(5, dim=2)
    other.load_state_dict(memory.state_dict())
    for one in (memory, other):
        one.add(torch.ones(3, 2), torch.tensor([8, 9, 10]))
    assert sorted(other.labels.tolist()) == [6, 7, 8, 9, 10]
    assert_same(other, memory)


def test_its_state_dict_is_tensors_that_a_file_can_hold(tmp_path):
    save_file(filled().state_dict(), tmp_path / "memory.safetensors")
    other = losses.Memory(5, dim=2)
    other.load_state_dict(load_file(tmp_path / "memory.safetensors"))
    assert_same(other, filled())


def test_a_state_dict_is_a_part_of_that_of_a_larger_module():
    both = torch.nn.ModuleDict({"network": torch.nn.Linear(3, 2), "memory": filled()})
    other = torch.nn.ModuleDict({"network": torch.nn.Linear(3, 2), "memory": losses.Memory(5, dim=2)})
    other.load_state_dict(both.state_dict())
    assert_same(other["memory"], filled())


def test_a_state_dict_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for all_embeddings"):
        losses.Memory(4, dim=2).load_state_dict(filled().state_dict())


def test_it_moves_with_to_and_learns_nothing():
    memory = filled().to("meta")
    assert {memory.embeddings.device.type, memory.labels.device.type} == {"meta"}
    assert list(memory.parameters()) == []
    assert memory.labels.dtype == torch.int64


def test_a_cast_leaves_labels_whole():
    memory = filled().to(torch.bfloat16)
    assert (memory.embeddings.dtype, memory.labels.dtype) == (torch.bfloat16, torch.int64)
    memory.add(torch.full((1, 2), 1.001), torch.tensor([9]))
    assert memory.embeddings[memory.labels == 9].tolist() == [[1.0, 1.0]]


def test_a_copy_is_one_of_its_own():
    memory = filled()
    other = copy.deepcopy(memory)
    other.add(torch.ones(1, 2), torch.tensor([9]))
    assert_same(memory, filled())


def test_the_loss_is_that_of_the_batch_and_the_memory_as_columns():
    memory, loss = filled(), losses.Contrastive()
    embeddings, labels = torch.randn(6, 2, requires_grad=True), torch.arange(6) // 2 + 3
    columns, owners = torch.cat([embeddings, memory.embeddings]), torch.cat([labels, memory.labels])
    wanted = loss(embeddings, labels, columns, owners, positions=torch.arange(6))
    assert torch.equal(memory.loss(loss, embeddings, labels), wanted)


def test_losses_of_proxies_refuse_it():
    loss = losses.ProxyAnchor(num_classes=8, dim=2)
    with pytest.raises(ValueError, match="compares with its proxies"):
        filled().loss(loss, torch.randn(4, 2), torch.arange(4))


@pytest.mark.parametrize("shape", [(4, 3), (3, 2), (4,)])
def test_embeddings_of_another_shape_are_refused(shape):
    memory = losses.Memory(5, dim=2)
    with pytest.raises(ValueError, match=r"embeddings has shape .*; this memory and the labels need \(4, 2\)"):
        memory.add(torch.zeros(shape), torch.arange(4))
    assert not len(memory)
