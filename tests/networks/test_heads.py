"""From pooled features to embeddings."""

import pytest
import torch
import torch.nn.functional as F

from nearfar.networks import create, embedder
from nearfar.networks.weights.save import load, save

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_linear_norm_has_mean_zero_and_spread_one_and_no_parameters_for_it():
    head = embedder.Head(6, 3, "linear_norm")
    assert set(head.state_dict()) == {"linear.weight", "linear.bias"}
    found = head(100 * X)
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.var(dim=1, unbiased=False), torch.ones(4), rtol=1e-3, atol=0)


def test_mlp_is_two_layers_with_a_relu():
    head = embedder.Head(6, 3, "mlp")
    state = head.state_dict()
    assert state["hidden.weight"].shape == (6, 6)
    hidden = F.linear(X, state["hidden.weight"], state["hidden.bias"]).relu()
    torch.testing.assert_close(head(X), F.linear(hidden, state["linear.weight"], state["linear.bias"]))


def test_a_residual_head_starts_from_the_features_and_adds_a_linear_layer(tmp_path):
    model = create("linear", in_dim=3, dim=None, head="residual")
    x = torch.randn(5, 3)
    assert model.dim == 3
    assert torch.equal(model(x), torch.nn.functional.normalize(x))
    torch.nn.init.normal_(model.heads["high"].linear.weight)
    expected = x + x @ model.heads["high"].linear.weight.T
    torch.testing.assert_close(model(x), torch.nn.functional.normalize(expected))
    torch.testing.assert_close(load(save(model, tmp_path))(x), model(x))
    with pytest.raises(ValueError, match="dim is 2 and head is 'residual'; it must be None or 3"):
        create("linear", in_dim=3, dim=2, head="residual")
