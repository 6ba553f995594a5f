"""`TrainStep` captured and replayed on a GPU: `python -m pytest tests/gpu/test_step.py`."""

import copy
import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.device import launch_replay
from fullstride.device.cuda_graph import CudaGraph
from fullstride.jvp import jvp, prepare
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.training.build import build_model
from fullstride.meanflow.training.step import randomize_zero_layers
from fullstride.step.torch import BACKENDS, Averages, LateMetrics, TrainStep, cosine, cosine_of, prefetch, warmed_up
from fullstride.step.torch.muon import Muon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
RECORDED = ("graph", "compile+graph")


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 24)).to(CUDA)
    prepare(model)
    return model


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A derivative in the target, as MeanFlow's."""
    u, du = jvp(model, (batch["x"].clone(),), (batch["v"].clone(),))
    error = (u - (batch["v"] - 0.3 * du).detach()).square()
    return error.mean(), {"worst": error.detach().max()}


def draw(batch: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
    return {"x": batch, "v": torch.randn(batch.shape, generator=generator, device=batch.device)}


def make(seed: int, backend: str, period: int = 2, **options: Any) -> TrainStep:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    given: dict[str, Any] = {"draw": draw, "accumulate": 2, "clip": 0.5, "ema": Averages(model, [0.9, 0.99], period)}
    given |= {"schedule": warmed_up(cosine(40), 5), "generator": torch.Generator(CUDA).manual_seed(seed)}
    return TrainStep(loss, model, optimizer, backend=backend, **given | options)


def batches(seed: int, count: int = 12, size: int = 32, last: int = 20) -> list[Tensor]:
    g = torch.Generator(CUDA).manual_seed(seed)
    return [torch.randn(n, 24, generator=g, device=CUDA) for n in [size] * (count - 1) + [last]]


def state(step: TrainStep) -> list[Tensor]:
    return [*step.body.model.parameters(), *(p for m in step.ema.models.values() for p in m.parameters())]


def apart(one: TrainStep, other: TrainStep) -> float:
    """The largest difference of their states."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(state(one), state(other), strict=True))


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise whenever the host waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_every_backend_makes_eagers_steps(backend, seed):
    torch._dynamo.reset()
    eager, other = make(seed, "eager"), make(seed, backend)
    for batch in batches(seed):
        torch.testing.assert_close(other(batch), eager(batch), rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(state(other), state(eager), rtol=2e-3, atol=2e-4)
    assert max(other.errors.values()) < 1e-4


@pytest.mark.parametrize("backend", RECORDED)
def test_a_replay_has_the_rate_of_the_share_that_was_filled_in_before_it(backend, seed):
    torch._dynamo.reset()
    shares = [torch.zeros((), dtype=torch.float64, device=CUDA) for _ in range(2)]
    eager, other = (
        make(seed, of, schedule=cosine_of(share)) for of, share in zip(("eager", backend), shares, strict=True)
    )
    for i, batch in enumerate(batches(seed, last=32)):
        for share in shares:
            share.fill_(i / 11)
        torch.testing.assert_close(other(batch), eager(batch), rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(state(other), state(eager), rtol=2e-3, atol=2e-4)
    before = [p.detach().clone() for p in other.body.model.parameters()]
    other(batches(seed)[0])  # at the end of the budget
    for p, was in zip(other.body.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), was, rtol=0, atol=0)


def test_a_compiled_step_compiles_every_kernel_before_its_launch(seed, monkeypatch):
    late, run = [], launch_replay.launch

    def launch(kernel: Any, *rest: Any) -> None:
        known = kernel.device_caches[torch.cuda.current_device()][0]
        before = len(known)
        run(kernel, *rest)
        late.extend([kernel.fn.__qualname__] * (len(known) - before))

    monkeypatch.setattr(launch_replay, "launch", launch)
    torch.manual_seed(seed)
    model = build_model(MODELS["unet_tiny"](), (3, 20, 20), num_classes=0)
    randomize_zero_layers(model.to(CUDA), torch.Generator(CUDA).manual_seed(seed))

    def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        t, r = torch.full((2, len(batch["x"])), 0.5, device=CUDA)
        u, du = jvp(model, (batch["x"], r, t), (batch["v"], torch.zeros_like(r), torch.ones_like(t)))
        return (u - (batch["v"] - 0.3 * du).detach()).square().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = TrainStep(error, model, optimizer, draw=draw, backend="compile")
    step(torch.randn(5, 3, 20, 20, device=CUDA))
    assert late == []


def test_averages_are_recorded_before_their_first_period_ends(seed):
    runs = []
    for backend in ("eager", "graph"):
        step = make(seed, backend, period=7)
        for batch in batches(seed):
            step(batch)
        runs.append(state(step))
    torch.testing.assert_close(*runs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("backend", RECORDED)
def test_replays_draw_new_numbers_and_do_not_wait(backend, seed):
    torch._dynamo.reset()
    step, late = make(seed, backend, accumulate=1), LateMetrics()
    same = batches(seed)[0]
    for _ in range(6):
        late(step(same))
    # At a rate of nothing, only the random numbers differ.
    step.made = 40
    with never_waiting(), torch._dynamo.config.patch(error_on_recompile=True):
        metrics = [step(same) for _ in range(5)]
        step.made = 40
    values = [m["loss"].item() for m in metrics]
    assert len(set(values)) == 5
    assert late.last()["loss"] > 0


def test_a_seed_gives_the_same_run_to_the_last_bit(seed):
    runs = []
    for _ in range(2):
        step = make(seed, "graph")
        metrics = [m.item() for batch in batches(seed) for m in step(batch).values()]
        runs.append([*metrics, *(x.sum().item() for x in state(step))])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_a_resumed_run_is_the_same_to_the_last_bit(backend, seed):
    given = batches(seed, count=20)
    whole = make(seed, backend)
    for batch in given:
        whole(batch)
    first, second = make(seed, backend), make(seed + 1, backend)
    for batch in given[:9]:
        first(batch)
    second.body.model.load_state_dict(first.body.model.state_dict())
    for decay, average in second.ema.models.items():
        average.load_state_dict(first.ema.models[decay].state_dict())
    second.body.optimizer.load_state_dict(copy.deepcopy(first.body.optimizer.state_dict()))
    assert first.body.generator is not None
    assert second.body.generator is not None
    second.body.generator.set_state(first.body.generator.get_state())
    second.made = first.made
    for batch in given[9:]:
        second(batch)
    assert all(torch.equal(a, b) for a, b in zip(state(whole), state(second), strict=True))


def test_a_guard_skips_within_a_replay(seed):
    step = make(seed, "graph", guard=lambda loss, _: ~loss.isfinite(), check_first_step=False)
    good, bad = batches(seed)[0], torch.full((32, 24), torch.nan, device=CUDA)
    for _ in range(6):
        step(good)
    before = [x.clone() for x in step.body.model.parameters()]
    step(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, step.body.model.parameters(), strict=True))
    step(good)
    assert not torch.equal(before[0], next(step.body.model.parameters()))


def test_a_guard_shortens_gradients_within_a_replay(seed):
    given, guard = batches(seed, count=12), lambda loss, norm: (~loss.isfinite(), (norm / 0.1).clamp(min=1))
    ends = {name: make(seed, name, guard=guard, check_first_step=False) for name in ("eager", "graph")}
    free = make(seed, "eager", check_first_step=False)
    for batch, step in itertools.product(given, (*ends.values(), free)):
        step(batch)
    # A rounding apart: 4e-9 of weights of 0.1 on an H100, where the shortening alone makes 4e-4 on a CPU.
    assert apart(ends["eager"], ends["graph"]) < 1e-6 < apart(ends["eager"], free)


def test_auto_measures_all_and_says_what_it_chose(seed):
    torch._dynamo.reset()
    said: list[str] = []
    step = make(seed, "auto", log=said.append)
    for batch in batches(seed, count=70, last=32):
        step(batch)
    assert step.backend in BACKENDS
    assert all(f"{name} " in said[-1] for name in BACKENDS)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.AdamW])
def test_auto_records_optimizers_whose_eager_counts_lie_on_the_host(kind, seed):
    """Neither fused nor capturable: the steps before the capture leave their counts on the host."""
    torch._dynamo.reset()
    model, said = network(seed), []
    optimizer = kind(model.parameters(), lr=1e-3)
    step = TrainStep(
        loss, model, optimizer, draw=draw, generator=torch.Generator(CUDA), backend="auto", log=said.append
    )
    for batch in batches(seed, count=70, last=32):
        step(batch)
    *_, line = said
    assert "Error" not in line
    assert all(f"{name} " in line for name in BACKENDS)


@pytest.mark.parametrize("backend", RECORDED)
def test_a_replay_heeds_what_is_done_to_the_optimizer(backend, seed):
    torch._dynamo.reset()
    eager, recorded = (make(seed, name, schedule=None) for name in ("eager", backend))
    for made, batch in enumerate(batches(seed, count=24, last=32)):
        for step in (eager, recorded):
            [group] = step.body.optimizer.param_groups
            if made == 7:
                group["lr"] = 3e-3
            elif made == 12:
                group["weight_decay"] = 0.4
            elif made == 18:
                step.body.model.get_parameter("0.bias").requires_grad_(False)
            step(batch)
    torch.testing.assert_close(state(recorded), state(eager), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("backend", RECORDED)
def test_muon_is_recorded_as_it_steps_eagerly(backend, seed):
    torch._dynamo.reset()
    models = []
    for name in ("eager", backend):
        model = network(seed)
        by_muon = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        optimizers = [Muon(by_muon, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=True)]
        generator = torch.Generator(CUDA).manual_seed(seed)
        step = TrainStep(loss, model, optimizers, draw=draw, generator=generator, backend=name)
        for batch in batches(seed, count=12, last=32):
            step(batch)
        models.append(model)
    for recorded, eager, first in zip(
        models[1].parameters(), models[0].parameters(), network(seed).parameters(), strict=True
    ):
        torch.testing.assert_close(recorded, eager, rtol=5e-3, atol=5e-4)
        assert (eager - first).abs().max() > 1e-3


def test_what_waits_for_the_device_cannot_be_recorded(seed):
    def waits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = loss(model, batch)[0]
        return value * (1.0 if value.item() > 0 else 2.0)

    model = network(seed)
    step = TrainStep(waits, model, torch.optim.AdamW(model.parameters()), draw=draw, backend="graph")
    for batch in batches(seed)[:3]:
        step(batch)
    with pytest.raises(RuntimeError):
        step(batches(seed)[3])
    assert torch.rand(2, device=CUDA).isfinite().all()  # what failed is over


def recorded(function: Callable[[], Tensor]) -> Tensor:
    """Capture a function that ran before on the capturing stream, and return its replay's result."""
    with torch.cuda.stream(torch.cuda.Stream()):
        function()
        found = CudaGraph(function, None).replay()
    torch.cuda.synchronize()
    return found


def test_a_dead_record_is_not_collected_while_another_is_made():
    x, thresholds = torch.ones(3, device=CUDA), gc.get_threshold()

    def function() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1)
            assert len([[i] for i in range(100)]) == 100  # enough for a collection, if there were any
        return x + 2

    dead: list[Any] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        dead.append(CudaGraph(lambda: x + 1, None))
    dead.append(dead)
    del dead
    try:
        assert recorded(function).tolist() == [3.0] * 3
    finally:
        gc.set_threshold(*thresholds)


def test_a_step_is_recorded_while_another_thread_pins_batches():
    stop, pinned = threading.Event(), []
    thread = threading.Thread(target=lambda: _pin(pinned, stop))
    x = torch.ones(8, 8, device=CUDA, requires_grad=True)
    thread.start()
    try:
        for _ in range(20):
            found = recorded(lambda: torch.autograd.grad((x @ x).square().sum(), x)[0])
            assert found.tolist() == [[256.0] * 8] * 8
    finally:
        stop.set()
        thread.join()
    assert pinned


def _pin(pinned: list[Tensor], stop: threading.Event) -> None:
    while not stop.is_set() and len(pinned) < 2000:
        pinned.append(torch.empty(100_000).pin_memory())


def test_prefetched_batches_are_those_of_the_host(seed):
    """The device is busy, so that a copy that is used too early shows."""
    torch.manual_seed(seed)
    given = [{"x": torch.randn(64, 500, 500)} for _ in range(6)]
    busy = torch.randn(6000, 6000, device=CUDA)
    sums = []
    for batch in prefetch(iter(given), CUDA):
        busy = busy @ busy / busy.norm()
        sums.append(batch["x"].double().sum())
        del batch
    assert [s.item() for s in sums] == [g["x"].to(CUDA).double().sum().item() for g in given]
