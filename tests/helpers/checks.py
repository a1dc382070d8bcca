"""The battery: what every loss must do, whatever it computes.

Each ``check_…`` takes a :class:`~cases.Case`. ``tests/losses/test_battery.py`` runs all of them over all
cases, so a new loss is tested as soon as it has a line in ``tests/cases.py`` and a loop among the oracles.
What only losses of pairs can do is in ``tests/pair_checks.py``.
"""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass

import class_oracles
import oracles
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CLASS_SIZES = (5, 3, 2, 1, 1)  # unbalanced, with singletons

# How far apart classes are, and how wide: hinges mostly closed, some open, mostly open.
SPREADS = {"apart": (1.0, 0.25), "touching": (1.0, 0.7), "mixed": (0.2, 1.0)}


# --- batches ------------------------------------------------------------------------------------------------


def make_batch(spread="touching", *, sizes=CLASS_SIZES, dim=4, seed=0, dtype=torch.float64):
    """Clustered embeddings, [m, d], and shuffled labels 0, 1, …"""
    generator = torch.Generator().manual_seed(seed)
    between, within = SPREADS[spread]
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    centers = torch.randn(len(sizes), dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), dim, generator=generator, dtype=torch.float64)
    return (between * centers[labels] + within * noise).to(dtype), labels


def make_gallery(dtype=torch.float64):
    """A batch, a gallery of another length that holds some of the anchors, and where."""
    embeddings, labels = make_batch(dtype=dtype)
    others, other_labels = make_batch(sizes=(4, 1, 3, 0, 1), seed=5, dtype=dtype)
    kept = torch.tensor([7, 2, 4])
    gallery = torch.cat([others, embeddings[kept]])
    positions = torch.full((len(labels),), -1)
    positions[kept] = len(others) + torch.arange(len(kept))
    return embeddings, labels, gallery, torch.cat([other_labels, labels[kept]]), positions


def batches(case, dtype=torch.float64):
    """A batch, and for a loss of pairs also one with a gallery."""
    return [make_batch(dtype=dtype), *([make_gallery(dtype)] if case.family == "pair" else [])]


def degenerate_batches():
    """Batches with little or nothing to learn from, by name."""
    embeddings, labels = make_batch()
    several = torch.arange(len(labels)) % 3
    zeros, copies = embeddings.clone(), embeddings.clone()
    zeros[[0, 1, 5]] = 0.0
    copies[[1, 2, 3]] = embeddings[0]
    return {
        "one embedding": (embeddings[:1], labels[:1]),
        "two of one class": (embeddings[:2], torch.tensor([3, 3])),
        "two of two classes": (embeddings[:2], torch.tensor([3, 4])),
        "a single class": (embeddings, torch.full_like(labels, 2)),
        "singletons": (embeddings[:5], torch.arange(5)),
        "zero vectors": (zeros, several),
        "only zero vectors": (torch.zeros_like(embeddings), several),
        "duplicates": (copies, several),
        "one point": (embeddings[:1].expand_as(embeddings).clone(), several),
        "opposite points": (torch.cat([embeddings[:3], -embeddings[:3]]), torch.tensor([0, 0, 1, 1, 1, 0])),
    }


# --- a loss, and its oracle, on a batch ---------------------------------------------------------------------


@dataclass
class Outcome:
    """A loss and its gradients by embeddings, gallery and parameters."""

    value: Tensor
    gradients: dict[str, Tensor]


def run(loss, embeddings, labels, gallery=None, gallery_labels=None, positions=None, *, seed=0):
    """The loss of a batch and all its gradients."""
    torch.manual_seed(seed)
    leaves = {"embeddings": embeddings.detach().clone().requires_grad_()}
    if gallery is not None:
        leaves["gallery"] = gallery.detach().clone().requires_grad_()
    value = loss(leaves["embeddings"], labels, leaves.get("gallery"), gallery_labels, positions=positions)
    return outcome(value, leaves | dict(loss.named_parameters()))


def outcome(value, leaves):
    """A value and its gradients by leaves; where none arrives, it is zero."""
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Outcome(value.detach(), dict(zip(leaves, gradients, strict=True)))


def seeded(loss, *batch, seed=0, **keywords):
    """The loss of a batch with the draws of ``run``."""
    torch.manual_seed(seed)
    return loss(*batch, **keywords)


def weights(loss, embeddings, labels, *gallery):
    """The pair weights of a batch with the draws of ``run``."""
    positions = {"positions": gallery[-1]} if gallery else {}
    return seeded(loss.pair_weights, embeddings, labels, *gallery[:-1], **positions)


def record_draws(loss):
    """Watch a random mining; the function returned tells which triplets each of m anchors got."""
    seen = []

    class Recorded(type(loss.mining)):
        def triplets(self, tile):
            found = positive, negative, valid = super().triplets(tile)
            if tile.columns is not None:
                positive, negative = tile.columns.gather(1, positive), tile.columns.gather(1, negative)
            seen.append((tile.rows, (positive, negative, valid)))
            return found

    recorded = object.__new__(Recorded)
    recorded.__dict__.update(loss.mining.__dict__)
    loss.mining = recorded

    def drawn(anchors):
        triplets = [[] for _ in range(anchors)]
        for rows, (positive, negative, real) in seen:
            for row, i in enumerate(range(anchors)[rows]):
                slots = zip(positive[row].tolist(), negative[row].tolist(), real[row].tolist(), strict=True)
                triplets[i] = [(p, n) for p, n, is_real in slots if is_real]
        return triplets

    return drawn


def draw_again(case, loss, labels, *, seed=0):
    """The classes or anchors a loss draws for a batch, once more from the seed of ``run``."""
    torch.manual_seed(seed)
    if case.draws == "classes":
        return loss.sample_classes(labels).tolist()
    if case.draws == "anchors":
        return loss.draw_anchors(labels).nonzero().flatten().tolist()
    return None


def run_oracle(
    case, loss, embeddings, labels, gallery=None, gallery_labels=None, positions=None, *, drawn=None, given=None
):
    """The same from the loops; ``drawn`` tells the triplets, classes or anchors that were drawn.

    Without gradients where autograd is turned off: they take most of the time.
    """
    leaves = {"embeddings": embeddings.detach().clone().requires_grad_()}
    columns, column_labels, own = leaves["embeddings"], labels, torch.arange(len(labels))
    if gallery is not None and gallery_labels is not None:
        columns = leaves["gallery"] = gallery.detach().clone().requires_grad_()
        column_labels = gallery_labels
        own = torch.full_like(labels, -1) if positions is None else positions
    parameters = {name: value.detach().clone().requires_grad_() for name, value in loss.named_parameters()}
    told_otherwise = {"mining", "sample_rate"} | ({"normalize"} if case.family == "pair" else set())
    settings = {name: value for name, value in case.settings.items() if name not in told_otherwise}
    if case.family in ("pair", "triple", "quadruple"):
        view = oracles.View(
            leaves["embeddings"], labels.tolist(), columns, column_labels.tolist(), own.tolist(), case.measure,
            case.normalize, case.query_only, parameters, given,
        )  # fmt: skip
        if case.paired:
            view.keep_pairs()
        view.mine(case.mining, case.mining_margin, drawn)
        value = getattr(oracles, case.key)(view, **settings)
    else:
        scene = class_oracles.Scene(leaves["embeddings"], labels.tolist(), parameters.get("proxies"), drawn, parameters)
        value = getattr(class_oracles, case.key)(scene, **settings)
    if not torch.is_grad_enabled():
        return Outcome(value, {})
    return outcome(value, leaves | parameters)


def run_both(case, *batch, oracle_gradients=True):
    """A loss in float64 and its oracle, with the same draws."""
    loss = case.create().double()
    triplets = record_draws(loss) if case.draws == "pairs" else None
    actual = run(loss, *batch)
    drawn = triplets(len(batch[1])) if triplets else draw_again(case, loss, batch[1])
    with torch.set_grad_enabled(oracle_gradients):
        return actual, run_oracle(case, loss, *batch, drawn=drawn)


def assert_close(actual, expected, tolerance, what="value"):
    """Equal up to ``tolerance`` times the largest number expected."""
    assert actual.shape == expected.shape, what
    scale = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual.to(torch.float64) - expected.to(torch.float64)).abs().max().item()
    assert error <= tolerance * max(scale, 1e-3), f"{what} is off by {error:.3g} at a scale of {scale:.3g}"


def assert_same(actual, expected, tolerance):
    assert_close(actual.value, expected.value, tolerance)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_close(actual.gradients[name], gradient, tolerance, f"gradient by {name}")


def assert_finite(outcome):
    assert outcome.value.ndim == 0
    assert outcome.value.isfinite(), f"value is {outcome.value}"
    for name, gradient in outcome.gradients.items():
        assert gradient.isfinite().all(), f"gradient by {name} is {gradient}"


class Watch(TorchDispatchMode):
    """The size of the largest tensor made, in bytes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return made


class NoRunningSums(TorchDispatchMode):
    """As torch.use_deterministic_algorithms(True) on a GPU, which cannot repeat running sums of floating point."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        assert "cumsum" not in str(function) or not made.is_floating_point(), function
        return made


# --- right numbers ------------------------------------------------------------------------------------------


def check_oracle(case):
    """Value and gradients are those of the loops."""
    for seed, spread in enumerate(SPREADS):
        assert_same(*run_both(case, *make_batch(spread, seed=seed)), tolerance=1e-9)


def check_gradcheck(case):
    """The gradient is the numerical derivative, by embeddings and parameters."""
    if not case.derivative or case.query_only:
        pytest.skip("the gradient is the paper's, not the derivative")
    loss = case.create(dim=3).double()
    embeddings, labels = make_batch(sizes=(3, 2, 1), dim=3, seed=3)

    def of_all(embeddings, *parameters):
        return seeded(loss, embeddings, labels)

    assert torch.autograd.gradcheck(of_all, (embeddings.requires_grad_(), *loss.parameters()))


def check_float32(case):
    """float32 is near float64."""
    loss = case.create(dim=8)
    for spread in SPREADS:
        embeddings, labels = make_batch(spread, dim=8, seed=7, dtype=torch.float32)
        actual = run(loss, embeddings, labels)
        assert actual.value.dtype == torch.float32
        if case.draws != "pairs":  # other numbers are drawn in other dtypes
            assert_same(actual, run(loss, embeddings.double(), labels), tolerance=2e-4)


# --- invariances --------------------------------------------------------------------------------------------


def check_permutation(case):
    """The order of the batch does not matter."""
    if case.draws in ("pairs", "anchors"):
        pytest.skip("draws follow the order")
    if case.paired:
        pytest.skip("the first two of a class are its pair")
    embeddings, labels = make_batch()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    loss = case.create().double()
    expected, actual = run(loss, embeddings, labels), run(loss, embeddings[order], labels[order])
    expected.gradients["embeddings"] = expected.gradients["embeddings"][order]
    assert_same(actual, expected, tolerance=1e-10)


def check_relabelling(case):
    """Labels are names: negative, huge, far apart, of any integer type."""
    embeddings, labels = make_batch()
    loss = case.create().double()
    expected = run(loss, embeddings, labels)
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        assert_same(run(loss, embeddings, labels.to(dtype)), expected, tolerance=1e-12)
    if case.label_count is not None:
        return
    for new_names in ([-1, 7, 3, 0, -5], [2**62, -(2**62), 2**62 + 1, 2**40, 10**12]):
        assert_same(run(loss, embeddings, torch.tensor(new_names)[labels]), expected, tolerance=1e-12)


def check_tile_size(case):
    """One row, or class, at a time or all at once: the same value, gradient, draws and pair weights."""
    if not case.tiled:
        pytest.skip("computed at once")
    for batch in batches(case):
        loss = case.create().double()
        assert loss.memory_budget > 0
        expected = run(loss, *batch)
        by_pairs = weights(loss, *batch) if case.family == "pair" else None
        columns = case.label_count if by_pairs is None else by_pairs.shape[1]
        for budget in (40 * len(batch[1]) * columns, 20_000, 4_000, 1):  # the first keeps all weights, not their tiles
            loss.memory_budget = budget
            assert_same(run(loss, *batch), expected, tolerance=1e-11)
        if by_pairs is not None:
            assert_close(weights(loss, *batch), by_pairs, 1e-11)


# --- degenerate batches -------------------------------------------------------------------------------------


TIED = ("zero vectors", "only zero vectors", "duplicates", "one point")


def check_degenerate(case):
    """Finite values and gradients, and the oracle's value, where there is little or nothing to learn."""
    # Among equal distances rounding decides which are chosen, or which are not zero.
    chooses = case.mining != "all" or case.settings.get("assignment") == "dynamic"
    rounding_decides = chooses or case.settings.get("average") == "pairs"
    for name, (embeddings, labels) in degenerate_batches().items():
        actual, expected = run_both(case, embeddings, labels, oracle_gradients=False)
        assert_finite(actual)
        if not (rounding_decides and name in TIED):
            assert abs(actual.value - expected.value) <= 1e-6 * max(1.0, abs(expected.value)), name
        assert_finite(run(case.create(), embeddings.float(), labels))
        if case.family == "pair":
            loss, low = case.create(), embeddings.float()
            assert_finite(run(loss, low, labels, low, labels))
            assert loss.pair_weights(low, labels).isfinite().all(), name


def check_connected(case):
    """Even a batch without anything to learn gives a loss with a graph, and 0 for an embedding without proxies."""
    for name, (embeddings, labels) in degenerate_batches().items():
        leaf = embeddings.clone().requires_grad_()
        value = case.create().double()(leaf, labels)
        assert value.requires_grad, name
        value.backward()
        assert leaf.grad is not None, name
        assert leaf.grad.isfinite().all(), name
        if case.family == "proxy":
            continue
        if name == "one embedding" and not any(case.settings.get(term) for term in ("l2", "nu")):
            alone = 0.02 * embeddings.square().sum() if case.key == "n_pair" and "l2" not in case.settings else 0.0
            assert value.item() == pytest.approx(float(alone), abs=1e-12), name


# --- numbers of other kinds ---------------------------------------------------------------------------------


def check_autocast(case):
    """Autocast does not reach into the loss."""
    embeddings, labels = make_batch(dim=8, dtype=torch.float32)
    loss = case.create(dim=8)
    expected = run(loss, embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(loss, embeddings, labels)
    assert actual.value.dtype == torch.float32
    assert_same(actual, expected, tolerance=1e-7)


def check_half_precision(case):
    """Half-precision embeddings are computed with in float32 and get gradients of their own type."""
    embeddings, labels = make_batch(dim=8)
    loss = case.create(dim=8)
    for dtype in (torch.bfloat16, torch.float16):
        low = embeddings.to(dtype)
        expected, actual = run(loss, low.float(), labels), run(loss, low, labels)
        assert actual.value.dtype == torch.float32
        assert actual.gradients["embeddings"].dtype == dtype
        assert_close(actual.value, expected.value, 1e-6)
        assert_close(actual.gradients["embeddings"], expected.gradients["embeddings"].to(dtype), 1e-2)
        if case.family in ("pair", "triple"):
            assert run(loss, low.float(), labels, low, labels).gradients["gallery"].dtype == dtype
    assert all(parameter.dtype == torch.float32 for parameter in loss.parameters())


def check_parameters_of_more_digits(case):
    """float64 parameters serve float32 embeddings: as float64 embeddings do, with a gradient in float32."""
    loss = case.create().double()
    if not list(loss.parameters()):
        pytest.skip("learns nothing")
    for batch in batches(case, torch.float32):
        exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]
        actual = run(loss, *batch)
        assert actual.value.dtype == torch.float64
        assert actual.gradients["embeddings"].dtype == torch.float32
        assert_same(actual, run(loss, *exact), tolerance=1e-6)
        if case.family == "pair":
            assert torch.equal(weights(loss, *batch), weights(loss, *exact))


def check_default_dtype(case):
    """What PyTorch makes of numbers by default is only seen in the parameters of losses made meanwhile."""
    embeddings, labels = make_batch(dtype=torch.float32)
    loss = case.create()
    expected = run(loss, embeddings, labels)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(run(loss, embeddings, labels), expected, tolerance=0.0)
        assert_finite(run(case.create(), embeddings, labels))
    finally:
        torch.set_default_dtype(torch.float32)


def check_default_device(case):
    """A loss is computed where its embeddings are, wherever PyTorch makes tensors by default; so are pair weights."""
    loss = case.create().double()
    for batch in batches(case):
        expected = run(loss, *batch)
        with torch.device("meta"):
            actual = run(loss, *batch)
        assert_same(actual, expected, tolerance=0.0)
        if case.family == "pair":
            expected = weights(loss, *batch)
            with torch.device("meta"):
                assert torch.equal(weights(loss, *batch), expected)


NO_LENGTHS = ("n_pair", "softmax")  # dot products of raw embeddings: these get large by themselves


def check_lengths_beyond_all_numbers(case):
    """A vector whose squared length overflows is not taken for a zero vector: the loss is NaN."""
    plain = case.key == "proxy_nca" and case.settings.get("normalize") is False
    if case.key in NO_LENGTHS or (plain and case.settings.get("measure") != "euclidean"):
        pytest.skip("asks nothing of lengths")
    embeddings, labels = make_batch(dtype=torch.float32)
    for budget in (None, 1) if case.tiled else (None,):
        loss = case.create()
        if budget is not None:
            loss.memory_budget = budget
        for rows in (slice(0, 1), slice(3, 4), slice(None)):
            longer = embeddings.clone()
            longer[rows] *= 1e20
            assert run(loss, longer, labels).value.isnan()
        if case.family == "proxy" and case.key != "group":
            with torch.no_grad():
                loss.proxies[0] *= 1e20
            assert run(loss, embeddings, labels).value.isnan()


# --- modules ------------------------------------------------------------------------------------------------


def check_copies(case):
    """A loss survives its state_dict, deepcopy and pickle."""
    embeddings, labels = make_batch()
    loss = case.create().double()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.05)
    expected = run(loss, embeddings, labels)
    assert loss.state_dict().keys() == dict(loss.named_parameters()).keys() | dict(loss.named_buffers()).keys()
    saved = io.BytesIO()
    torch.save(loss.state_dict(), saved)
    saved.seek(0)
    restored = case.create().double()
    restored.load_state_dict(torch.load(saved, weights_only=True))
    for other in (restored, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert_same(run(other, embeddings, labels), expected, tolerance=1e-12)


def check_parameters_reach_the_optimiser(case):
    """param_groups holds every parameter once, and a step moves them."""
    loss = case.create()
    groups = loss.param_groups(lr=0.1)
    listed = [parameter for group in groups for parameter in group["params"]]
    assert {id(parameter) for parameter in listed} == {id(parameter) for parameter in loss.parameters()}
    if not listed:
        assert groups == []
        return
    before = [parameter.detach().clone() for parameter in listed]
    embeddings, labels = make_batch(dtype=torch.float32)
    optimiser = torch.optim.SGD(groups, lr=0.1)
    torch.manual_seed(0)
    loss(embeddings, labels).backward()
    optimiser.step()
    assert all((parameter != old).any() for parameter, old in zip(listed, before, strict=True))


def check_backward_twice(case):
    """retain_graph lets backward run again, with the same result."""
    embeddings, labels = make_batch()
    leaf = embeddings.clone().requires_grad_()
    value = case.create().double()(leaf, labels)
    (first,) = torch.autograd.grad(value, leaf, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(value, leaf)
    assert torch.equal(first, second)


def check_incoming_gradient(case):
    """A loss that is scaled and added to another passes on what it should."""
    loss = case.create().double()
    (one, labels), (two, _) = make_batch(seed=0), make_batch(seed=1)
    expected = [run(loss, batch, labels).gradients for batch in (one, two)]
    one, two = one.clone().requires_grad_(), two.clone().requires_grad_()
    values = []
    for batch in (one, two):
        torch.manual_seed(0)
        values.append(loss(batch, labels))
    (values[0] + 3.0 * values[1]).backward()
    assert_close(one.grad, expected[0]["embeddings"], 1e-11)
    assert_close(two.grad, 3.0 * expected[1]["embeddings"], 1e-11)
    for name, parameter in loss.named_parameters():
        assert_close(parameter.grad, expected[0][name] + 3.0 * expected[1][name], 1e-11)


def check_second_derivative(case):
    """create_graph is harmless; differentiating the gradient is refused in words, or right."""
    embeddings, labels = make_batch("mixed")
    loss = case.create().double()
    expected = run(loss, embeddings, labels).gradients["embeddings"]
    torch.manual_seed(0)
    leaf = embeddings.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
    assert_close(gradient.detach(), expected, 1e-12)
    if case.twice:
        assert torch.autograd.gradgradcheck(lambda leaf: seeded(loss, leaf, labels), (leaf,))
    else:
        with pytest.raises(NotImplementedError, match="second derivative"):
            gradient.square().sum().backward()


def check_no_grad(case):
    """Without a graph the value is the same, also of embeddings that ask for a gradient."""
    embeddings, labels = make_batch()
    loss = case.create().double()
    expected = run(loss, embeddings, labels).value
    embeddings.requires_grad_()
    for budget in (None, 1) if case.tiled else (None,):
        if budget is not None:
            loss.memory_budget = budget
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                value = seeded(loss, embeddings, labels)
                by_pairs = weights(loss, embeddings * 1.0, labels) if case.family == "pair" else None
            assert not value.requires_grad
            assert_close(value, expected, 1e-11)
            if by_pairs is not None:  # derivatives, found where none are asked for
                assert_close(by_pairs, weights(loss, embeddings, labels), 1e-11)


def check_inputs_untouched(case):
    """A loss writes into nothing it was given, nor into its parameters, nor into what autograd shares with others."""
    loss = case.create().double()
    for batch in batches(case):
        embeddings, labels, *gallery = (tensor.requires_grad_(tensor.is_floating_point()) for tensor in batch)
        given = [embeddings, labels, *gallery, *loss.parameters()]
        before = [tensor.detach().clone() for tensor in given]
        positions = {"positions": gallery.pop()} if gallery else {}
        loss(embeddings, labels, *gallery, **positions).backward()
        if case.family == "pair":
            weights(loss, *batch)
        assert all(torch.equal(tensor, old) for tensor, old in zip(given, before, strict=True))


def check_deterministic(case):
    """No loss asks a GPU for what it cannot repeat."""
    embeddings, labels = make_batch(dtype=torch.float32)
    with NoRunningSums():
        case.create()(embeddings.requires_grad_(), labels).backward()


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
