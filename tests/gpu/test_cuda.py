"""The same numbers on a GPU, without waiting for it. Losses are recorded and replayed: see engine/cuda_graphs.py."""

import copy

import pytest
import torch
from cases import CASES, DEFAULTS, create
from checks import (
    Outcome,
    assert_close,
    assert_same,
    draw_again,
    make_batch,
    make_gallery,
    record_draws,
    run,
    run_oracle,
)
from waiting import no_waiting

import nearfar as nf
from nearfar.engine import cuda_graphs
from nearfar.losses.angular import BAND_FROM

# A loss that could not be recorded says so in a warning.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:.*without a CUDA graph")]

STEPS = 6  # the third records, the others replay
REPEATABLE = [case for case in CASES if not case.random]
DRAWING = [case for case in CASES if case.random]
SIZES = (8, 6, 4, 2, 1)
DIM = 16


def over(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def with_galleries(cases):
    return [case for case in cases if case.family in ("pair", "triple")]


every_loss = over(DEFAULTS)
every_repeatable_loss = over([case for case in DEFAULTS if not case.random])


def batches(dtype=torch.float64):
    """A batch for each step, all of one shape and none like another."""
    spreads = ("apart", "touching", "mixed")
    return [make_batch(spreads[step % 3], sizes=SIZES, dim=DIM, seed=step, dtype=dtype) for step in range(STEPS)]


def on_gpu(loss, *batch):
    outcome = run(loss, *(tensor.cuda() for tensor in batch))
    return Outcome(outcome.value.cpu(), {name: gradient.cpu() for name, gradient in outcome.gradients.items()})


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@over(REPEATABLE)
def test_every_step_has_the_numbers_of_a_cpu(case, dtype, tolerance):
    here, there = case.create(dim=DIM).to(dtype), case.create(dim=DIM).to(dtype).cuda()
    for batch in batches(dtype):
        assert_same(on_gpu(there, *batch), run(here, *batch), tolerance=tolerance)


@over(with_galleries(REPEATABLE))
def test_every_step_with_a_gallery(case):
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    here, there = case.create().double(), case.create().double().cuda()
    for step in range(STEPS):
        batch = embeddings + 0.1 * step, labels.roll(step), gallery - 0.1 * step, gallery_labels, positions.roll(step)
        assert_same(on_gpu(there, *batch), run(here, *batch), tolerance=1e-9)


@over([case for case in REPEATABLE if case.tiled])
def test_tiles(case):
    here, there = case.create(dim=DIM).double(), case.create(dim=DIM).double().cuda()
    batch = batches()[1]
    expected = run(here, *batch)
    for budget in (1, 8_000, 30_000):
        there.memory_budget = budget
        for _ in range(4):
            assert_same(on_gpu(there, *batch), expected, tolerance=1e-9)


@over([case for case in REPEATABLE if case.key == "angular"])
def test_a_large_batch_in_a_band(case):
    embeddings, labels = make_batch(sizes=(1, 2, 3, 4, 5) * 150, dim=DIM)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    batch = embeddings[order], labels[order]
    assert len(labels) > BAND_FROM
    assert_same(on_gpu(case.create().double().cuda(), *batch), run(case.create().double(), *batch), tolerance=1e-9)


@over([case for case in DRAWING if case.draws == "pairs"])
def test_drawn_pairs_have_the_loss_of_the_loops(case):
    loss = case.create().double().cuda()
    drawn = record_draws(loss)
    embeddings, labels = batches()[1]
    actual = on_gpu(loss, embeddings, labels)
    expected = run_oracle(case, loss.cpu(), embeddings, labels, drawn=drawn(len(labels)))
    assert_same(actual, expected, tolerance=1e-9)


@over([case for case in DRAWING if case.draws != "pairs"])
def test_drawn_classes_and_anchors_have_the_loss_of_the_loops(case):
    """In every step, recorded or not; twice as many classes as samples, so that some are left out."""
    loss = case.create(dim=DIM, num_classes=40).double().cuda()
    for embeddings, labels in batches():
        actual = on_gpu(loss, embeddings, labels)
        drawn = draw_again(case, loss, labels.cuda())
        expected = run_oracle(case, copy.deepcopy(loss).cpu(), embeddings, labels, drawn=drawn)
        assert_same(actual, expected, tolerance=1e-9)


@pytest.mark.parametrize("mining", ["random", "distance_weighted"])
def test_replays_go_on_drawing(mining):
    embeddings, labels = make_batch("mixed", sizes=SIZES, dim=8)
    here, there = (nf.losses.Triplet(mining=mining, margin=0.5) for _ in range(2))
    expected = torch.stack([here(embeddings, labels) for _ in range(400)])
    leaf, labels = embeddings.cuda().requires_grad_(), labels.cuda()
    values = torch.stack([there(leaf, labels).detach() for _ in range(400)]).cpu()
    assert len(values.unique()) > 300
    assert abs(values.mean() - expected.mean()) < 4 * expected.std() * (2 / 400) ** 0.5
    assert values.std().item() == pytest.approx(expected.std().item(), rel=0.2)


def check_that_no_step_waits(loss, steps):
    torch.ones(2, 2, device="cuda").matmul(torch.ones(2, 2, device="cuda")).sum().item()  # set up the libraries
    given = [[tensor.cuda() for tensor in step] for step in steps]
    with no_waiting():
        for embeddings, labels, *gallery in given:
            columns, positions = gallery[:2], gallery[2] if gallery else None
            loss(embeddings.clone().requires_grad_(), labels, *columns, positions=positions).backward()


@over([case for case in CASES if not case.waits])
def test_no_step_waits_for_the_gpu(case):
    check_that_no_step_waits(case.create(dim=DIM).cuda(), batches(torch.float32))


@over([case for case in CASES if case.family == "proxy" and case.tiled])
def test_no_step_with_small_tiles_of_classes_waits(case):
    loss = case.create(dim=DIM, num_classes=100).cuda()
    loss.memory_budget = 8_000
    check_that_no_step_waits(loss, batches(torch.float32))


@over(with_galleries([case for case in CASES if not case.waits]))
def test_no_step_with_a_gallery_and_small_tiles_waits(case):
    loss = case.create().cuda()
    loss.memory_budget = 8_000
    check_that_no_step_waits(loss, [make_gallery(torch.float32)] * STEPS)


@every_repeatable_loss
def test_two_results_may_be_alive_at_once(case):
    here, there = case.create(dim=DIM).double(), case.create(dim=DIM).double().cuda()
    steps = batches()
    for batch in steps[:4]:
        on_gpu(there, *batch)
    expected = [run(here, *batch) for batch in steps[:2]]
    leaves = [embeddings.cuda().requires_grad_() for embeddings, _ in steps[:2]]
    values = [there(leaf, labels.cuda()) for leaf, (_, labels) in zip(leaves, steps, strict=False)]
    (values[0] + 3.0 * values[1]).backward()
    for leaf, outcome, factor in zip(leaves, expected, (1.0, 3.0), strict=True):
        assert_close(leaf.grad.cpu(), factor * outcome.gradients["embeddings"], 1e-9)


@every_loss
def test_a_result_can_be_differentiated_again_after_the_next_step(case):
    loss = case.create(dim=DIM).cuda()
    steps = batches(torch.float32)
    for batch in steps[:4]:
        on_gpu(loss, *batch)
    leaf = steps[0][0].cuda().requires_grad_()
    value = loss(leaf, steps[0][1].cuda())
    first = torch.autograd.grad(value, leaf, retain_graph=True)[0].clone()
    on_gpu(loss, *steps[1])
    assert torch.equal(torch.autograd.grad(value, leaf)[0], first)


@every_loss
def test_a_gradient_handed_out_is_not_overwritten_by_later_steps(case):
    loss = case.create(dim=DIM).cuda()
    steps = batches(torch.float32)
    handed_out = []
    for embeddings, labels in steps:
        leaf = embeddings.cuda().requires_grad_()
        value = loss(leaf, labels.cuda())
        (gradient,) = torch.autograd.grad(value, leaf)
        handed_out.append((value, value.clone(), gradient, gradient.clone()))
    assert all(torch.equal(value, then) and torch.equal(now, before) for value, then, now, before in handed_out)


CHANGES = {
    "contrastive": {"margin": 0.0, "average": "pairs"},
    "triplet": {"margin": 0.7},
    "lifted_structure": {"margin": 0.2, "squared": False},
    "lifted_structure_generalized": {"margin": -1.0},
    "n_pair": {"l2": 0.5},
    "binomial_deviance": {"beta": 5.0},
    "raw": {"base": 0.1},
    "multi_similarity": {"alpha": 5.0},
    "ranked_list": {"temperature": 1.0},
    "nra": {"alpha": 2.0},
    "circle": {"margin": 0.1},
    "sup_con": {"temperature": 0.5},
    "nt_xent": {"temperature": 0.5},
    "angular": {"angle": 20.0},
    "histogram": {"bins": 20},
    "smooth_ap": {"temperature": 0.1},
    "fast_ap": {"bins": 20},
    "normalized_softmax": {"temperature": 0.5},
    "proxy_nca": {"scale": 3.0, "include_positive": True},
    "arcface": {"margin": 0.1, "scale": 8.0},
    "cosface": {"margin": 0.1},
    "soft_triple": {"gamma": 1.0, "tau": 2.0},
    "proxy_anchor": {"alpha": 8.0},
    "proxy_repel": {"margin": 0.5},
}


@pytest.mark.parametrize(
    ("key", "setting", "value"), [(key, *change) for key, changes in CHANGES.items() for change in changes.items()]
)
def test_a_setting_changed_between_steps_is_respected(key, setting, value):
    here, there = create(key, {}, dim=DIM), create(key, {}, dim=DIM).cuda()
    batch = batches()[2]
    before = [on_gpu(there, *batch) for _ in range(4)][-1]
    for loss in (here, there):
        setattr(loss, setting, value)
    for _ in range(4):
        after = on_gpu(there, *batch)
        assert_same(after, run(here, *batch), tolerance=1e-9)
    assert after.value != before.value


def test_a_mining_changed_between_steps_is_respected():
    here, there = nf.losses.Raw(), nf.losses.Raw().cuda()
    batch = batches()[1]
    for mining in ("all", "hard", "valid_triplet"):
        here.mining = there.mining = nf.mining.create(mining)
        for _ in range(4):
            assert_same(on_gpu(there, *batch), run(here, *batch), tolerance=1e-9)
    here.mining.margin = 0.4
    assert_same(on_gpu(there, *batch), run(here, *batch), tolerance=1e-9)


def learned(create, name, lr, momentum, steps):
    """How far a parameter went; recorded steps see what the optimizer made of it and give it the right gradient."""
    losses = create().double(), create().double().cuda()
    optimizers = [torch.optim.SGD(loss.param_groups(lr=lr), lr=lr, momentum=momentum) for loss in losses]
    here, there = (getattr(loss, name).detach() for loss in losses)
    start = here.clone()
    for embeddings, labels in steps:
        for loss, optimizer, device in zip(losses, optimizers, ("cpu", "cuda"), strict=True):
            optimizer.zero_grad()
            loss(embeddings.to(device).requires_grad_(), labels.to(device)).backward()
            optimizer.step()
        assert_close(there.cpu(), here, 1e-9)
    return (here - start).abs()


@pytest.mark.parametrize("num_classes", [None, 5])
def test_a_boundary_that_learns_is_followed(num_classes):
    def create():
        return nf.losses.Margin(mining="all", num_classes=num_classes, beta_lr=0.5)

    assert learned(create, "beta", 0.1, 0.0, batches()).all()


@over([case for case in REPEATABLE if case.family == "proxy"])
def test_proxies_that_learn_are_followed(case):
    assert learned(lambda: case.create(dim=DIM), "proxies", 1e-4, 0.9, batches() + batches()).amax() > 1e-4


@every_loss
def test_autocast(case):
    embeddings, labels = (tensor.cuda() for tensor in batches(torch.float32)[0])
    network, loss = torch.nn.Linear(DIM, 8).cuda(), case.create(dim=8).cuda()
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = network(embeddings)
            assert output.dtype == torch.bfloat16
            torch.manual_seed(0)
            value = loss(output, labels)
        assert value.dtype == torch.float32
        value.backward()
        torch.manual_seed(0)
        assert_close(value.detach(), loss(output.detach().float(), labels), 1e-5)


@over([case for case in DEFAULTS if not case.waits])
def test_nan_in_the_batch_or_in_a_gallery_shows_in_the_loss(case):
    loss = case.create(dim=DIM).cuda()
    for step, (embeddings, labels) in enumerate(batches(torch.float32)):
        broken = embeddings.cuda()
        broken[step, 0] = float("nan")
        assert loss(broken.requires_grad_(), labels.cuda()).isnan()
        assert loss(embeddings.cuda().requires_grad_(), labels.cuda()).isfinite()
        if case.family in ("pair", "triple"):
            assert loss(embeddings.cuda().requires_grad_(), labels.cuda(), broken, labels.cuda()).isnan()


@every_loss
def test_degenerate_batches(case):
    for embeddings, labels in (
        (torch.zeros(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])),
        (torch.ones(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])),
        (torch.randn(6, 4), torch.zeros(6, dtype=torch.long)),
        (torch.randn(6, 4), torch.arange(6)),
        (torch.randn(1, 4), torch.zeros(1, dtype=torch.long)),
    ):
        loss = case.create().cuda()
        for _ in range(4):
            outcome = on_gpu(loss, embeddings, labels)
            assert outcome.value.isfinite()
            assert outcome.gradients["embeddings"].isfinite().all()


@every_repeatable_loss
def test_a_compiled_step(case):
    loss, network = case.create(dim=8).cuda(), torch.nn.Linear(DIM, 8).cuda()

    def step(inputs, labels):
        return loss(network(inputs).tanh(), labels)

    def gradient(step, *batch):
        network.zero_grad()
        step(*batch).backward()
        return network.weight.grad.clone()

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager")
    for embeddings, labels in batches(torch.float32):
        batch = embeddings.cuda(), labels.cuda()
        assert_close(gradient(compiled, *batch), gradient(step, *batch), 1e-4)


@every_repeatable_loss
def test_a_copy_of_a_loss_in_use(case):
    loss = case.create(dim=DIM).double().cuda()
    for batch in batches():
        expected = on_gpu(loss, *batch)
    assert_same(on_gpu(copy.deepcopy(loss), *batch), expected, tolerance=1e-9)


@every_repeatable_loss
def test_other_streams(case):
    here, there = case.create(dim=DIM).double(), case.create(dim=DIM).double().cuda()
    for batch in batches():
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                assert_same(on_gpu(there, *batch), run(here, *batch), tolerance=1e-9)


@over([case for case in DEFAULTS if case.family == "pair" and not case.random])
def test_pair_weights(case):
    embeddings, labels = batches()[1]
    weights = case.create().double().cuda().pair_weights(embeddings.cuda(), labels.cuda())
    assert_close(weights.cpu(), case.create().double().pair_weights(embeddings, labels), 1e-9)


@every_loss
def test_labels_may_stay_on_the_cpu(case):
    embeddings, labels = batches(torch.float32)[0]
    torch.manual_seed(0)
    value = case.create(dim=DIM).cuda()(embeddings.cuda(), labels)
    torch.manual_seed(0)
    assert_close(value.detach(), case.create(dim=DIM).cuda()(embeddings.cuda(), labels.cuda()).detach(), 1e-6)


def test_a_gallery_elsewhere_is_an_error():
    embeddings, labels = batches(torch.float32)[0]
    with pytest.raises(ValueError, match="gallery is on cpu and embeddings on cuda"):
        nf.losses.Raw()(embeddings.cuda(), labels.cuda(), embeddings, labels)


def test_proxies_elsewhere_are_an_error():
    embeddings, labels = batches(torch.float32)[0]
    with pytest.raises(ValueError, match=r"embeddings are on cuda.* and proxies on cpu"):
        create("proxy_anchor", {}, dim=DIM)(embeddings.cuda(), labels.cuda())


@over([case for case in DEFAULTS if case.tiled])
def test_4096_embeddings_take_at_most_300_mib(case):
    embeddings, labels = torch.randn(4096, 512, device="cuda"), torch.arange(4096, device="cuda") // 4
    loss = case.create(dim=512, num_classes=1024).cuda()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    leaf = embeddings.requires_grad_()
    for _ in range(STEPS):
        leaf.grad = None
        loss(leaf, labels).backward()
    # Besides, the gradient of the loss's own parameters: the one before, the one found, and a recording's.
    gradients = 3 * sum(parameter.nbytes for parameter in loss.parameters())
    assert torch.cuda.max_memory_allocated() - before <= 300 * 2**20 + gradients


def test_recording_can_be_turned_off():
    loss = nf.losses.Raw()
    loss.cuda_graph = False
    embeddings, labels = (tensor.cuda() for tensor in make_batch(dtype=torch.float32))
    embeddings.requires_grad_()
    for _ in range(STEPS):
        loss(embeddings, labels).backward()
    assert loss not in cuda_graphs._recordings
