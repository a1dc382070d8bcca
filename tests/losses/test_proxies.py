"""Losses with class vectors: how these learn, which of them take part, and numbers known beforehand."""

import math

import pytest
import torch
from cases import CLASSES, DEFAULTS, create
from checks import SPREADS, Outcome, Watch, assert_close, assert_finite, assert_same, make_batch, run, seeded
from torch import nn
from torch.nn.functional import cross_entropy, normalize, one_hot

import nearfar as nf

PROXY_CASES = [case for case in DEFAULTS if case.family == "proxy"]
SAMPLING_KEYS = [
    "softmax", "normalized_softmax", "proxy_nca", "arcface", "cosface", "sphereface", "adaface", "soft_triple",
]  # fmt: skip
POOLING_KEYS = ["arcface", "soft_triple"]
LR_MULTIPLIERS = dict.fromkeys((case.key for case in PROXY_CASES), 10.0) | dict.fromkeys(
    ("proxy_nca", "soft_triple", "proxy_anchor", "proxy_repel"), 100.0
)

every_proxy_loss = pytest.mark.parametrize("case", PROXY_CASES, ids=lambda case: case.key)
every_sampling_loss = pytest.mark.parametrize("key", SAMPLING_KEYS)


def with_proxies(key, proxies, **settings):
    """A loss whose class vectors are these."""
    proxies = torch.as_tensor(proxies)
    loss = create(key, settings, num_classes=len(proxies), dim=proxies.shape[-1]).to(proxies.dtype)
    with torch.no_grad():
        loss.proxies.copy_(proxies)
    return loss


# --- learning -----------------------------------------------------------------------------------------------


def test_losses_that_sample_classes():
    assert set(SAMPLING_KEYS) == {key for key in nf.losses.names() if "sample_rate" in nf.losses.defaults(key)}


@every_proxy_loss
def test_proxies_are_drawn_with_the_seed_and_are_about_one_long(case):
    proxies = case.create(dim=512).proxies
    assert torch.equal(proxies, case.create(dim=512).proxies)
    assert proxies.shape[0] == CLASSES
    assert proxies.shape[-1] == 512
    assert_close(proxies.detach().norm(dim=-1), torch.ones(proxies.shape[:-1]), 0.2)
    assert abs(proxies.mean().item()) < 4 / proxies.numel() ** 0.5 / 512**0.5


@every_proxy_loss
def test_proxies_have_one_group_with_their_rate_and_no_decay(case):
    loss = case.create()
    (group,) = loss.param_groups(lr=0.01)
    assert [id(parameter) for parameter in group["params"]] == [id(loss.proxies)]
    assert group["lr"] == pytest.approx(0.01 * LR_MULTIPLIERS[case.key])
    assert group["weight_decay"] == 0.0
    (group,) = create(case.key, {"lr_multiplier": 3.0}).param_groups(lr=0.01)
    assert group["lr"] == pytest.approx(0.03)


@every_proxy_loss
def test_an_optimiser_moves_proxies_at_their_rate_and_does_not_shrink_them(case):
    """Adam's first step is as long as the learning rate, whatever the gradient; decay would come on top."""
    network, loss = torch.nn.Linear(8, 4), case.create()
    model_groups = [{"params": list(network.parameters()), "lr": 1e-3}]
    optimizer = torch.optim.AdamW([*model_groups, *loss.param_groups(lr=1e-3)], weight_decay=0.5)
    inputs, labels = make_batch("mixed", dim=8, dtype=torch.float32)
    torch.manual_seed(0)
    loss(network(inputs), labels).backward()
    loss.proxies.grad[0] = 0.0
    before = loss.proxies.detach().clone()
    optimizer.step()
    moved = (loss.proxies.detach() - before).abs()
    learning = loss.proxies.grad.abs() > 1e-4
    assert learning.any()
    rate = torch.tensor(1e-3 * LR_MULTIPLIERS[case.key])
    assert_close(moved[learning], rate.expand_as(moved[learning]), 1e-3)
    assert not moved[0].any()


@every_proxy_loss
def test_float32_proxies_serve_float64_embeddings(case):
    embeddings, labels = make_batch()
    loss = case.create()
    value = loss(embeddings.requires_grad_(), labels)
    value.backward()
    assert value.dtype == embeddings.grad.dtype == torch.float64
    assert loss.proxies.dtype == loss.proxies.grad.dtype == torch.float32


@every_proxy_loss
def test_one_side_may_be_frozen(case):
    """Constant proxies leave the embeddings their gradient, and the other way round."""
    embeddings, labels = make_batch()
    loss = case.create().double()
    expected = run(loss, embeddings, labels).gradients
    seeded(loss, embeddings, labels).backward()
    assert_close(loss.proxies.grad, expected["proxies"], 1e-12)
    loss.zero_grad()
    loss.requires_grad_(False)
    leaf = embeddings.clone().requires_grad_()
    seeded(loss, leaf, labels).backward()
    assert_close(leaf.grad, expected["embeddings"], 1e-12)
    assert loss.proxies.grad is None


@every_proxy_loss
def test_classes_are_only_numbers(case):
    """Another order of the classes, and of the proxies with them, changes nothing."""
    if case.random:
        pytest.skip("draws follow the numbers")
    embeddings, labels = make_batch()
    loss = case.create().double()
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(1))
    expected = run(loss, embeddings, order[labels])
    actual = run(with_proxies(case.key, loss.proxies[order]), embeddings, labels)
    expected.gradients["proxies"] = expected.gradients["proxies"][order]
    assert_same(actual, expected, tolerance=1e-11)


# --- sampled classes ----------------------------------------------------------------------------------------


@every_sampling_loss
@pytest.mark.parametrize(
    ("rate", "samples", "count"), [(0.5, 4, 10), (0.26, 4, 6), (0.01, 4, 4), (0.5, 15, 15), (0.5, 30, 20)]
)
def test_the_classes_of_the_batch_are_drawn_and_others_up_to_the_rate(key, rate, samples, count):
    """At least as many as there are samples, which may all be of different classes."""
    labels = torch.tensor([19, 3, 7])[torch.arange(samples) % 3]
    drawn = create(key, {"sample_rate": rate}).sample_classes(labels).tolist()
    assert len(drawn) == len(set(drawn)) == count
    assert {19, 3, 7} <= set(drawn) <= set(range(CLASSES))


@every_sampling_loss
def test_other_classes_are_drawn_equally_often(key):
    torch.manual_seed(0)
    loss, labels, draws = create(key, {"sample_rate": 0.5}), torch.tensor([3, 3, 7]), 600
    counts = torch.stack([loss.sample_classes(labels) for _ in range(draws)]).flatten().bincount(minlength=CLASSES)
    assert counts[3] == counts[7] == draws
    others, chance = counts[[c for c in range(CLASSES) if c not in (3, 7)]], 8 / 18
    assert (others - draws * chance).abs().max() < 4 * (draws * chance * (1 - chance)) ** 0.5


@every_sampling_loss
def test_a_sampled_loss_is_that_of_a_smaller_problem(key):
    """The same value and gradients as if there were no other classes; these learn nothing."""
    for spread in SPREADS:
        embeddings, labels = make_batch(spread)
        loss = create(key, {"sample_rate": 0.65}).double()
        torch.manual_seed(0)
        drawn = loss.sample_classes(labels)
        assert len(drawn) == 13
        smaller = with_proxies(key, loss.proxies.detach()[drawn])
        expected = run(smaller, embeddings, (labels.unsqueeze(1) == drawn).int().argmax(dim=1))
        by_proxies = torch.zeros_like(loss.proxies)
        by_proxies[drawn] = expected.gradients["proxies"]
        actual = run(loss, embeddings, labels)
        assert_same(actual, Outcome(expected.value, expected.gradients | {"proxies": by_proxies}), tolerance=1e-11)


@every_sampling_loss
def test_every_pass_draws_anew_and_all_classes_need_no_draw(key):
    embeddings, labels = make_batch()
    torch.manual_seed(0)
    assert len({create(key, {"sample_rate": 0.65})(embeddings, labels).item() for _ in range(5)}) == 5
    before = torch.get_rng_state()
    create(key, {"sample_rate": 1.0})(embeddings, labels)
    assert torch.equal(torch.get_rng_state(), before)


# --- cross-entropy ------------------------------------------------------------------------------------------


def cosines(embeddings, proxies):
    return normalize(embeddings, dim=-1) @ normalize(proxies, dim=-1).T


def nearest_cosines(embeddings, centers):
    return torch.einsum("md,ckd->mck", normalize(embeddings, dim=-1), normalize(centers, dim=-1)).amax(dim=2)


def arcface_logits(embeddings, proxies, labels):
    cosine = cosines(embeddings, proxies) if proxies.ndim == 2 else nearest_cosines(embeddings, proxies)
    angle = cosine.acos()
    target = torch.where(angle + 0.5 <= math.pi, (angle + 0.5).cos(), cosine - 0.5 * math.sin(0.5))
    return 64 * torch.where(one_hot(labels, len(proxies)).bool(), target, cosine)


def soft_triple_logits(embeddings, proxies, labels):
    near = torch.einsum("md,ckd->mck", normalize(embeddings, dim=-1), normalize(proxies, dim=-1))
    return 20 * (((10 * near).softmax(dim=2) * near).sum(dim=2) - 0.1 * one_hot(labels, len(proxies)).to(near))


CROSS_ENTROPIES = [
    ("softmax", {}, lambda e, w, y: e @ w.T),
    ("normalized_softmax", {}, lambda e, w, y: cosines(e, w) / 0.05),
    ("proxy_nca", {"include_positive": True}, lambda e, w, y: 18 * cosines(e, w)),
    ("arcface", {}, arcface_logits),
    ("arcface", {"centers": 3}, arcface_logits),
    ("cosface", {}, lambda e, w, y: 64 * (cosines(e, w) - 0.35 * one_hot(y, len(w)).to(e))),
    ("soft_triple", {"tau": 0.0}, soft_triple_logits),
]


def check_cross_entropy(loss, logits, embeddings, labels):
    """Compare a loss with the cross-entropy of its logits by autograd."""
    leaf, proxies = embeddings.clone().requires_grad_(), loss.proxies.detach().clone().requires_grad_()
    value = cross_entropy(logits(leaf, proxies, labels), labels)
    by_leaf, by_proxies = torch.autograd.grad(value, [leaf, proxies])
    expected = Outcome(value.detach(), {"embeddings": by_leaf, "proxies": by_proxies})
    assert_same(run(loss, embeddings, labels), expected, tolerance=1e-10)


@pytest.mark.parametrize(("key", "settings", "logits"), CROSS_ENTROPIES)
@pytest.mark.parametrize("budget", [1, 100_000, 2**28])
def test_many_classes_have_the_cross_entropy_of_torch(key, settings, logits, budget):
    embeddings, labels = make_batch(sizes=(1,) * 40, dim=16)
    loss = create(key, settings, num_classes=300, dim=16).double()
    loss.memory_budget = budget
    check_cross_entropy(loss, logits, embeddings, labels * 7)


@pytest.mark.parametrize("size", [40, 25, 16, 15, 12, 5])
@pytest.mark.parametrize("width", [1, 7, 64, 150, 300])
def test_tiles_that_are_stored_in_the_gradient_are_not_overwritten_too_early(size, width):
    dim = 16
    embeddings, labels = make_batch(sizes=(1,) * size, dim=dim)
    loss = create("arcface", {}, num_classes=300, dim=dim).double()
    loss.memory_budget = (size + 2 * dim) * 8 * width
    check_cross_entropy(loss, arcface_logits, embeddings, labels * 7)


@pytest.mark.parametrize("scale", [60.0, 80.0 - math.log(500), 80.0, 200.0])
def test_opposite_proxies_neither_overflow_nor_vanish(scale):
    """All other classes at the same or at the opposite side: the largest and the smallest exponentials there are."""
    labels = torch.arange(4)
    for sign in (1.0, -1.0):
        outcomes = []
        for dtype, budget in ((torch.float64, 2**28), (torch.float32, 1000)):
            loss = create("cosface", {"scale": scale, "margin": 0.0}, num_classes=500, dim=2).to(dtype)
            with torch.no_grad():
                loss.proxies.copy_(torch.tensor([sign, 0.0]))
                loss.proxies[:4] = torch.tensor([sign, 0.01])
            loss.memory_budget = budget
            outcomes.append(run(loss, torch.tensor([[1.0, 0.0]], dtype=dtype).expand(4, 2), labels))
        assert_same(outcomes[1], outcomes[0], tolerance=1e-4)


@pytest.mark.parametrize("key", ["softmax", "normalized_softmax", "proxy_nca", "arcface", "cosface"])
def test_a_single_class_leaves_nothing_to_learn(key):
    embeddings, labels = make_batch(sizes=(4,))
    outcome = run(create(key, {}, num_classes=1).double(), embeddings, labels)
    assert outcome.value.item() == pytest.approx(0.0, abs=1e-12)
    assert not any(gradient.any() for gradient in outcome.gradients.values())


@every_proxy_loss
def test_a_single_class_is_finite(case):
    embeddings, labels = make_batch(sizes=(4,), dtype=torch.float32)
    assert_finite(run(case.create(num_classes=1), embeddings, labels))


MANY_CLASSES = [(key, {}) for key in (*SAMPLING_KEYS, "proxy_anchor") if key != "soft_triple"]


@pytest.mark.parametrize(("key", "settings"), [*MANY_CLASSES, *((key, {"centers": 2}) for key in POOLING_KEYS)])
def test_no_tensor_holds_the_whole_batch_against_all_classes(key, settings):
    """A gradient is as large as the proxies; batch × classes would be four times as large."""
    loss = create(key, settings, num_classes=200_000, dim=16)
    loss.memory_budget = 2**23
    embeddings = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Watch() as watch:
        loss(embeddings, torch.arange(64)).backward()
    assert watch.largest == loss.proxies.numel() * 4


# --- proxy NCA ----------------------------------------------------------------------------------------------


def test_proxy_nca_compares_vectors_three_long_by_squared_distance():
    embeddings, labels = make_batch()
    loss = create("proxy_nca", {}).double()
    squares = torch.cdist(3 * normalize(embeddings, dim=1), 3 * normalize(loss.proxies.detach(), dim=1)).square()
    own = one_hot(labels, CLASSES).bool()
    expected = squares[own] + (-squares).masked_fill(own, -math.inf).logsumexp(dim=1)
    assert_close(loss(embeddings, labels).detach(), expected.mean(), 1e-12)


def test_proxy_nca_keeps_the_samples_whose_probability_underflows():
    """Nearest to a wrong class at a scale of 1000: the probability is e⁻¹⁴⁰⁰, the gradient the largest of all."""
    loss = with_proxies("proxy_nca", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], scale=1000.0)
    hard, easy = [-0.6, 0.8, 0.0], [0.8, 0.6, 0.0]
    outcome = run(loss, torch.tensor([hard, easy]), torch.tensor([0, 0]))
    assert outcome.value.item() == pytest.approx((1400 - 200) / 2)
    # Along the tangent (0.8, 0.6) the own cosine changes by 0.8 and the other by 0.6.
    expected = torch.tensor([0.8, 0.6, 0.0]) * (-0.8 + 0.6) * 1000 / 2
    assert_close(outcome.gradients["embeddings"][0], expected, 1e-5)


# --- margins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sign", "target"), [(1.0, math.cos(0.5)), (-1.0, -1 - 0.5 * math.sin(0.5))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arcface_at_its_proxy_and_opposite_to_it(sign, target, dtype):
    proxies = torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]], dtype=dtype)
    loss = with_proxies("arcface", proxies, scale=4.0)
    outcome = run(loss, sign * proxies[:1], torch.tensor([0]))
    assert_finite(outcome)
    assert outcome.value.item() == pytest.approx(math.log1p(math.exp(-4 * target)), rel=1e-6)


@pytest.mark.parametrize("margin", [0.5, 1.0, 1.5])
def test_arcface_costs_more_the_larger_the_angle(margin):
    """Also beyond π − margin, where cos(angle + margin) would turn."""
    loss = with_proxies("arcface", torch.eye(3, dtype=torch.float64)[[0, 2]], margin=margin, scale=4.0)
    angles = torch.linspace(0.0, math.pi, 200, dtype=torch.float64)
    points = torch.stack([angles.cos(), angles.sin(), torch.zeros_like(angles)], dim=1)
    values = torch.stack([loss(point.unsqueeze(0), torch.tensor([0])) for point in points]).detach()
    assert (values.diff() > 0).all()


def test_arcface_has_one_vector_for_a_class_unless_told():
    assert create("arcface", {}).proxies.shape == (CLASSES, 4)
    assert create("arcface", {"centers": 3}).proxies.shape == (CLASSES, 3, 4)


def test_arcface_with_equal_centres_is_that_with_one_and_the_first_learns():
    batch, plain = make_batch(), create("arcface", {}).double()
    loss = with_proxies("arcface", plain.proxies.detach().unsqueeze(1).expand(-1, 3, -1), centers=3)
    actual, expected = run(loss, *batch), run(plain, *batch)
    assert not actual.gradients["proxies"][:, 1:].any()
    actual.gradients["proxies"] = actual.gradients["proxies"][:, 0]
    assert_same(actual, expected, tolerance=1e-12)


# --- proxies as anchors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [32.0, 1000.0])
def test_proxy_anchor_does_not_overflow(alpha):
    """A sample opposite to its proxy and on top of another: log(1 + e^x) is x."""
    loss = with_proxies("proxy_anchor", [[1.0, 0.0], [-0.6, 0.8]], alpha=alpha)
    outcome = run(loss, torch.tensor([[-0.6, 0.8]]), torch.tensor([0]))
    assert_finite(outcome)
    assert outcome.value.item() == pytest.approx(alpha * (0.6 + 0.1) + alpha * (1 + 0.1) / 2)


def test_proxies_that_repel_through_a_large_batch_do_not_overflow():
    """All samples and all proxies on one point: Σ_x (w·x)(x·w') is the size of the batch."""
    point = torch.tensor([0.6, 0.8])
    loss = with_proxies("proxy_repel", point.expand(5, 2), through_batch=True)
    outcome = run(loss, point.expand(4096, 2), torch.arange(4096) % 5)
    assert_finite(outcome)
    samples = sum(1 for i in range(4096) if i % 5 == 0)
    pull = (math.log1p(samples * math.exp(-32 * 0.9)) + 4 * math.log1p((samples - 1) * math.exp(-32 * 0.9))) / 5
    assert outcome.value.item() == pytest.approx(32 * (4096 + 0.1) + math.log(4) + pull, rel=1e-5)


def test_the_groups_of_a_module_have_every_parameter_once_and_those_of_losses_at_their_own_rate():
    network, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), create("proxy_anchor", {"lr_multiplier": 3.0})
    network[0].requires_grad_(False)
    module = nn.ModuleDict({"network": network, "loss": loss, "again": loss, "margin": nf.losses.Margin()})
    groups = nf.losses.param_groups(module, 0.1)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.3, 5e-5])
    trained = [each for each in module.parameters() if each.requires_grad]
    assert [id(each) for group in groups for each in group["params"]] == [id(each) for each in trained]
    assert [group.get("weight_decay") for group in groups] == [None, 0.0, 0.0]
    assert nf.losses.param_groups(nf.losses.Contrastive(), 0.1) == []
