import copy
import functools
import gc
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.step.torch import Averages, LateMetrics, TrainStep, cosine, cosine_of, warmed_up
from fullstride.step.torch import train_step as train_step_module
from fullstride.step.torch.runners import backends as backends_module
from fullstride.step.torch.runners.comparison import StepError
from fullstride.step.torch.runners.graph import prepared
from fullstride.step.torch.runners.isolated import Snapshot
from tests.step.torch.networks import OnHost, Rerun, batches, by_hand, loss, network, noisy


@pytest.fixture
def recorded(monkeypatch):
    """`graph` and `compile+graph` on the host, where what is recorded runs again."""
    monkeypatch.setattr(backends_module, "GraphRunner", OnHost)
    monkeypatch.setattr(train_step_module, "check_backend", lambda *_: None)
    monkeypatch.setattr(Rerun, "recorded", 0)


def make(seed: int, **options: Any) -> tuple[nn.Module, TrainStep]:
    """A step of SGD with all that it can have."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"draw": noisy, "accumulate": 2, "clip": 0.3, "backend": "eager"}
    given |= {"ema": Averages(model, [0.9]), "schedule": warmed_up(cosine(20), 4), "log": lambda _: None}
    given |= {"generator": torch.Generator().manual_seed(seed)}
    return model, TrainStep(loss, model, optimizer, **given | options)


def rate(step: int) -> float:
    """Return the learning rate of the schedule in `make`."""
    return 0.1 * min(1, (step + 1) / 4) * (0.5 + 0.5 * math.cos(math.pi * step / 20))


def expected(seed: int) -> Any:
    """`make` by hand."""
    generator = torch.Generator().manual_seed(seed)
    return by_hand(network(seed), batches(seed), parts=2, clip=0.3, rate=rate, decay=0.9, generator=generator)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_steps_are_those_written_out_by_hand(backend, seed):
    model, step = make(seed, backend=backend)
    metrics = [step(batch) for batch in batches(seed)]
    weights, averages, losses = expected(seed)
    torch.testing.assert_close(list(model.parameters()), weights)
    torch.testing.assert_close(list(step.ema.model.parameters()), averages)
    torch.testing.assert_close([m["loss"].item() for m in metrics], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(list(step.ema.model.buffers()), list(model.buffers()))
    assert all(m["grad_norm"] > 0 and m["worst"] > m["loss"] for m in metrics)
    assert step.made == len(metrics)


@pytest.mark.usefixtures("recorded")
def test_a_record_is_made_once_and_again_after_loading(seed):
    model, step = make(seed, backend="graph")
    for batch in batches(seed):
        step(batch)
    assert Rerun.recorded == 2  # the step, and the averages
    step.body.optimizer.load_state_dict(copy.deepcopy(step.body.optimizer.state_dict()))
    other, plain = make(seed)
    other.load_state_dict(model.state_dict())
    plain.body.optimizer.load_state_dict(copy.deepcopy(step.body.optimizer.state_dict()))
    plain.made = step.made
    for batch in batches(seed + 1):
        generator = step.body.generator
        assert generator is not None
        assert plain.body.generator is not None
        plain.body.generator.set_state(generator.get_state())
        step(batch)
        plain(batch)
    assert Rerun.recorded == 4
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


def _halve_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * float(group["lr"])


def _decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.3


def _freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("0.weight").requires_grad_(False)


def _unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("0.bias").requires_grad_(True)


def _add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [model.get_parameter("3.bias")], "lr": 0.7})


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("change", [_halve_rate, _decay, _freeze, _unfreeze, _add_group])
@pytest.mark.parametrize("before", [0, 2, 6])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_recorded_step_heeds_what_is_done_to_the_optimizer(change, before, scheduled, seed):
    found = {}
    for backend in ("eager", "graph"):
        model = network(seed)
        model.get_parameter("0.bias").requires_grad_(False)
        given = [p for name, p in model.named_parameters() if name != "3.bias"]
        optimizer = torch.optim.SGD(given, lr=0.1, momentum=0.9)
        schedule = cosine(30) if scheduled else None
        step = TrainStep(loss, model, optimizer, schedule=schedule, clip=0.3, backend=backend)
        for made, batch in enumerate(batches(seed, count=12, last=6)):
            if made == before:
                change(model, optimizer)
            step(batch)
        found[backend] = list(model.parameters())
    torch.testing.assert_close(found["graph"], found["eager"])
    assert Rerun.recorded == (2 if before == 6 and change is not _halve_rate else 1)


@pytest.mark.usefixtures("recorded")
def test_a_change_before_a_smaller_batch_does_not_make_that_the_recorded_one(seed):
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = TrainStep(loss, model, optimizer, backend="graph")
    for batch in batches(seed, count=6, last=4)[:5]:
        step(batch)
    _decay(model, optimizer)
    step(batches(seed, count=1, last=4)[0])
    for batch in batches(seed, count=5, last=6):
        step(batch)
    assert Rerun.recorded == 2
    assert step._runner.form(expected=True) == "backend=graph, recorded"


@pytest.mark.usefixtures("recorded")
def test_groups_that_change_at_every_step_are_never_recorded_and_it_is_said_once(capsys, seed):
    found = {}
    for backend in ("eager", "graph"):
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20, cycle_momentum=True)
        step = TrainStep(loss, model, optimizer, backend=backend)
        for batch in batches(seed, count=12, last=6):
            step(batch)
            schedule.step()
        found[backend] = list(model.parameters())
    torch.testing.assert_close(found["graph"], found["eager"])
    assert Rerun.recorded == 0
    assert "".join(capsys.readouterr()).count("the optimizer's groups changed again") == 1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax])
def test_what_eager_steps_left_on_the_host_goes_to_the_parameters_device(kind):
    weight = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(3, device="meta")
    optimizer.step()
    own = optimizer.state[weight]
    assert own["step"].device.type == "cpu"
    [given] = prepared(optimizer, torch.device("cpu"))
    assert {value.device.type for value in own.values()} == {"meta"}
    assert given == pytest.approx(0.1)
    assert optimizer.param_groups[0]["lr"] is given


def test_a_compiled_step_is_eagers(seed):
    one, eager = make(seed)
    two, compiled = make(seed, backend="compile")
    for batch in batches(seed, count=4):
        torch.testing.assert_close(eager(batch), compiled(batch))
    torch.testing.assert_close(list(one.parameters()), list(two.parameters()))
    assert list(compiled.errors) == ["backend=compile, usual shapes"]  # the last smaller batch is eager fp32's own
    assert max(compiled.errors.values()) < 1e-5


@pytest.mark.parametrize("gate", [True, False])
def test_the_collector_waits_while_a_form_is_prepared_and_not_after(gate, seed):
    seen = []

    def watched(model: nn.Module, batch: Any) -> Any:
        seen.append(gc.isenabled())
        return loss(model, batch)

    model = network(seed)
    step = TrainStep(
        watched, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", check_first_step=gate
    )
    whole, *_, smaller = batches(seed)
    for batch, waits in ((whole, True), (whole, False), (smaller, True), (smaller, False)):
        seen.clear()
        step(batch)
        assert set(seen) == {not waits}
        assert gc.isenabled()


def broken(body: Any, factor: float = 1.5) -> Any:
    """Replace the loss by one that a wrong compiler might produce."""

    def wrong(model: nn.Module, batch: Any) -> Any:
        value, metrics = loss(model, batch)
        weight = model[3].weight.square().sum()  # pyright: ignore[reportIndexIssue]
        return value + factor * (weight - weight.detach()), metrics

    return replace(body, loss=wrong)


def test_a_wrong_gradient_is_refused_though_the_loss_is_right(monkeypatch, seed):
    monkeypatch.setattr(train_step_module, "compiled", broken)
    _, step = make(seed, backend="compile")
    with pytest.raises(StepError, match=r"backend=compile, usual shapes: the gradients differ most at 3\.weight"):
        step(batches(seed)[0])


@pytest.mark.parametrize(("precision", "backend"), [("fp32", "compile"), ("bf16", "eager")])
def test_a_loss_that_cancels_is_compared_by_what_it_is_made_of(precision, backend, seed):
    """PPO's loss before its first step cancels: every ratio is 1 and the advantages' mean is 0."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 5))
    advantage = torch.randn(257)
    batch = {"x": torch.randn(257, 7), "a": torch.randint(5, (257, 1)), "gain": advantage - advantage.mean()}
    with torch.no_grad():
        batch["before"] = model(batch["x"]).log_softmax(-1).gather(1, batch["a"]).squeeze(1)

    def clipped(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        now = model(batch["x"]).log_softmax(-1).gather(1, batch["a"]).squeeze(1)
        ratio = (now - batch["before"]).exp()
        return -torch.minimum(ratio * batch["gain"], ratio.clamp(0.8, 1.2) * batch["gain"]).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = TrainStep(clipped, model, optimizer, precision=precision, backend=backend)
    assert abs(float(step(batch)["loss"])) < 1e-2
    assert step.errors


def test_a_wrong_loss_is_refused_though_its_gradient_is_right(monkeypatch, seed):
    shifted = lambda body: replace(body, loss=lambda *given: (loss(*given)[0] + 0.1, {}))  # noqa: E731
    monkeypatch.setattr(train_step_module, "compiled", shifted)
    _, step = make(seed, backend="compile")
    with pytest.raises(StepError, match="backend=compile, usual shapes: the loss is"):
        step(batches(seed)[0])


def test_the_gate_leaves_no_trace(seed):
    one, gated = make(seed, backend="compile")
    two, plain = make(seed, backend="compile", check_first_step=False)
    for batch in batches(seed):
        gated(batch)
        plain(batch)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert gated.errors
    assert not plain.errors


@pytest.mark.usefixtures("recorded")
def test_auto_stays_with_the_fastest_and_a_wrong_one_leaves_no_trace(monkeypatch, seed):
    def slow(body: Any) -> Any:
        def late(model: nn.Module, batch: Any) -> Any:
            time.sleep(0.02)
            return loss(model, batch)

        return replace(body, loss=late)

    monkeypatch.setattr(train_step_module, "compiled", broken)
    said = []
    model, step = make(seed, backend="auto", log=said.append)
    step.body = slow(step.body)
    step._choose("auto")
    other, plain = make(seed)
    for batch in batches(seed, count=60, last=6):
        step(batch)
        plain(batch)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))
    pause, line = said
    assert pause == "backend=auto: compile compiles the loss now, which may take minutes"
    assert line.startswith("backend=auto: ")
    assert "compile: StepError: backend=compile, usual shapes" in line
    assert step.backend in ("eager", "graph")
    assert step.made == 60


def test_a_step_that_auto_undoes_leaves_no_trace_in_the_guard(monkeypatch, seed):
    monkeypatch.setattr(train_step_module, "compiled", lambda body: broken(body, 1e6))

    def guarded(**options: Any) -> list[torch.Tensor]:
        memory = [torch.zeros((), dtype=torch.float64) for _ in range(2)]

        def judge(_: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            memory[0].add_(1)
            memory[1].lerp_(norm, 0.5)
            return norm.isnan()

        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = TrainStep(loss, model, optimizer, guard=judge, guard_state=memory, log=lambda _: None, **options)
        for batch in batches(seed, count=20):
            step(batch)
        return memory

    torch.testing.assert_close(guarded(backend="auto"), guarded(backend="eager"))


def test_what_cannot_be_says_why(seed):
    with pytest.raises(ConfigError, match="backend=graph: CUDA graphs are CUDA's, the device is cpu"):
        make(seed, backend="graph")
    with pytest.raises(ConfigError, match="backend"):
        make(seed, backend="grahp")
    with pytest.raises(ValueError, match="accumulate is 0"):
        make(seed, accumulate=0)
    _, step = make(seed)
    with pytest.raises(ValueError, match=r"first dimensions \[\(2,\), \(3,\)\]"):
        step({"x": torch.ones(2, 5), "y": torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"first dimensions \[\(0,\)\], expected one size for all, 1 or more"):
        step({"x": torch.ones(0, 5), "y": torch.ones(0, 3)})
    with pytest.raises(ConfigError, match="precision=tf32: TF32 is CUDA's, the device is cpu"):
        make(seed, precision="tf32")
    step.body = replace(step.body, loss=lambda *given: (loss(*given)[0], {"loss": torch.zeros(())}))
    step._choose("eager")
    with pytest.raises(ValueError, match=r"metrics named \['loss'\], expected other names"):
        step(next(iter(batches(seed, 1))))


def _squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_another_optimizer_gets_each_steps_gradient(backend, gate, seed):
    model, plain = network(seed), network(seed)
    (first, norm, _, last), (its_first, its_norm, _, its_last) = model.children(), plain.children()
    step = TrainStep(
        _squared, model, torch.optim.SGD(first.parameters(), lr=0.125), backend=backend, check_first_step=gate
    )
    other, both = torch.optim.SGD(last.parameters(), lr=0.25), torch.optim.SGD(its_first.parameters(), lr=0.125)
    both.add_param_group({"params": list(its_last.parameters()), "lr": 0.25})
    for batch in batches(seed):
        step(batch)
        other.step()
        other.zero_grad()
        both.zero_grad()
        its_norm.zero_grad()
        _squared(plain, batch).backward()
        both.step()
        for found, right in zip(norm.parameters(), its_norm.parameters(), strict=True):
            torch.testing.assert_close(found.grad, right.grad)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


class _TooLarge(torch.autograd.Function):
    """The identity, whose gradient in bf16 is 100 times too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = 100.0 if torch.is_autocast_enabled("cpu") else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.factor


def test_a_wrong_gradient_that_another_optimizer_is_to_take_is_refused(seed):
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def wrong(model: Any, batch: Any) -> torch.Tensor:
        return (model[0](batch["x"]) + _TooLarge.apply(model[1](batch["x"])) - batch["y"]).square().mean()  # pyright: ignore

    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    step = TrainStep(wrong, model, optimizer, precision="bf16", backend="eager")
    with pytest.raises(StepError, match=r"the gradients differ most at 1\."):
        step({"x": torch.randn(6, 5), "y": torch.randn(6, 3)})


def test_what_a_step_cannot_take_is_told_in_a_line(seed):
    model = nn.Linear(3, 3)
    x = torch.randn(4, 3)
    rates = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="backend=compile: LBFGS steps by a closure, .*; use backend=eager"):
        TrainStep(lambda m, b: m(b).mean(), model, torch.optim.LBFGS(model.parameters()), backend="compile")
    with pytest.raises(ValueError, match="a Identity without parameters"):
        TrainStep(lambda m, b: m(b).mean(), nn.Identity(), rates, backend="eager")
    for metric, told in (
        (str(len(x)), "a metric n that is a str"),
        (x.mean(0), r"a metric n of float32\[3\], expected a real"),
    ):
        told_too: Any = {"n": metric}
        step = TrainStep(lambda m, b, more=told_too: (m(b).mean(), more), model, rates, backend="eager")
        with pytest.raises(ValueError, match=told):
            step(x)
    words = nn.Embedding(7, 3, sparse=True)
    step = TrainStep(lambda m, b: m(b).mean(), words, torch.optim.SparseAdam(words.parameters()), backend="compile")
    with pytest.raises(ValueError, match="weight has a sparse gradient, expected dense ones"):
        step(torch.arange(4))


def test_both_halves_of_complex_weights_are_compared(monkeypatch, seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 3, dtype=torch.complex64)

    def power(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).abs().square().mean()

    def halved(body: Any) -> Any:
        def off(model: nn.Module, batch: Any) -> torch.Tensor:
            value = power(model, batch)
            weight = next(model.parameters())
            return value + (x := 0.5 * weight.imag.sum()) - x.detach()

        return replace(body, loss=off)

    monkeypatch.setattr(train_step_module, "compiled", halved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StepError, match="the gradients differ most at weight"):
        TrainStep(power, model, optimizer, backend="compile")(torch.randn(5, 3, dtype=torch.complex64))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_a_batch_whose_names_come_in_another_order_is_the_same_batch(backend, seed):
    model = nn.Linear(3, 3).double()
    mean = lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()  # noqa: E731
    step = TrainStep(mean, model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    g = torch.Generator().manual_seed(seed)
    for made in range(6):
        x, y = torch.randn(2, 4, 3, generator=g, dtype=torch.float64)
        wanted = mean(model, {"x": x, "y": y}).item()
        found = step({"x": x, "y": y} if made < 5 else {"y": y, "x": x})["loss"].item()
        assert found == pytest.approx(wanted, rel=1e-5)


def test_an_optimizer_state_from_elsewhere_keeps_its_rate(seed):
    model, step = make(seed)
    kept = torch.optim.SGD(model.parameters(), lr=0.2).state_dict()
    step.body.optimizer.load_state_dict(kept)
    step(next(iter(batches(seed, 1))))
    assert step.body.optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * rate(0) / 0.1)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_what_a_guard_divides_is_compared_as_it_was(clip, skips, seed):
    model = network(seed)
    guard = lambda *_: (torch.tensor(skips), torch.tensor(4.0))  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = TrainStep(loss, model, optimizer, guard=guard, clip=clip, backend="graph")
    first, *more = batches(seed, count=5, last=6)
    step.body.optimizer.zero_grad()
    before = copy.deepcopy(model)
    step(first)
    gradients = torch.autograd.grad(loss(before, first)[0], list(before.parameters()))
    norm = torch.nn.utils.get_total_norm(gradients)
    share = 0 if skips else 0.1 / max(4, 1 if clip is None else norm / clip)
    moved = [p - share * g for p, g in zip(before.parameters(), gradients, strict=True)]
    torch.testing.assert_close(list(model.parameters()), moved)
    for batch in more:
        step(batch)
    assert step.errors.keys() == {"backend=graph, recorded"}
    assert max(step.errors.values()) < 1e-6


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adamax, torch.optim.SGD])
def test_a_guard_wants_an_optimizer_that_skips(kind, seed):
    model = network(seed)
    always = lambda loss, norm: torch.ones((), dtype=torch.bool)  # noqa: E731
    with pytest.raises(ConfigError, match=f"guard: {kind.__name__} does not skip .*, expected a fused optimizer"):
        TrainStep(loss, model, kind(model.parameters()), guard=always)
    step = TrainStep(loss, model, torch.optim.SGD(model.parameters(), fused=True), guard=always, backend="eager")
    before = [p.detach().clone() for p in model.parameters()]
    step(next(iter(batches(seed, 1))))
    torch.testing.assert_close(list(map(torch.Tensor.detach, model.parameters())), before, rtol=0, atol=0)


def test_metrics_come_one_call_late():
    late = LateMetrics()
    with pytest.raises(ValueError, match="no metrics"):
        late.last()
    assert late({"loss": torch.tensor(2.0)}) is None
    assert late({"loss": torch.tensor(3.0), "norm": torch.tensor(1.0)}) == {"loss": 2.0}
    assert late.last() == {"loss": 3.0, "norm": 1.0}


class Reassigning(nn.Linear):
    """Counts its passes in a buffer, in another tensor each time."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, input):  # noqa: A002, the name of the one that it takes the place of
        self.passes = self.passes + 1
        return super().forward(input)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("gate", [False, True])
def test_a_buffer_that_a_record_would_read_as_it_was_is_refused(gate):
    def step(backend: str) -> TrainStep:
        model = Reassigning()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainStep(
            lambda m, x: (m(x).square().mean(), {}),
            model,
            optimizer,
            backend=backend,
            check_first_step=gate,
            log=lambda _: None,
        )

    with pytest.raises(StepError, match=r"the buffers passes, expected that it writes into them"):
        step("graph")(torch.randn(4, 3))
    eager = step("eager")
    for _ in range(5):
        eager(torch.randn(4, 3))
    assert eager.body.model.get_buffer("passes") >= 5


def test_schedules_are_torchs():
    parameter = [nn.Parameter(torch.ones(()))]
    for ours, theirs in (
        (cosine(9), functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9)),
        (
            warmed_up(lambda m: m.double() * 0 + 1, 5),
            functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2, total_iters=4),
        ),
    ):
        optimizer = torch.optim.SGD(parameter, lr=1.0)
        schedule: Any = theirs(optimizer)
        for made in range(9):
            assert ours(torch.tensor(made)).item() == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
            optimizer.step()
            schedule.step()


def test_a_cosine_stays_at_its_end():
    assert cosine(9)(torch.tensor([9, 13, 18])).tolist() == pytest.approx([0, 0, 0])


def test_what_a_refused_candidate_left_in_the_optimizer_is_forgotten_alone(seed):
    kept, late = (nn.Parameter(torch.ones(3)) for _ in range(2))
    model = nn.ParameterList([kept, late])
    optimizer = torch.optim.Adam(model.parameters())
    body = TrainStep(lambda *_: torch.zeros(()), model, optimizer, backend="eager").body
    kept.grad = torch.randn(3, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    saved = Snapshot(body)
    late.grad = torch.ones(3)
    optimizer.step()
    saved.restore()
    torch.testing.assert_close(optimizer.state_dict()["state"], before)


def test_a_rate_falls_over_a_budget_that_is_no_number_of_steps():
    share = torch.zeros((), dtype=torch.float64)
    schedule = cosine_of(share)
    for used in (0.0, 0.25, 0.5, 1.0):
        share.fill_(used)
        assert schedule(torch.tensor(700)).item() == pytest.approx(0.5 + 0.5 * math.cos(math.pi * used))


def test_what_is_compiled_is_kept_in_the_cache(monkeypatch, tmp_path, seed):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # to be unset again afterwards
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    torch._dynamo.reset()
    _, step = make(seed, backend="compile", check_first_step=False)
    step(batches(seed)[0])
    assert any(path.is_file() for path in (tmp_path / "inductor").rglob("*"))


def test_convolutions_are_searched_for_steps_and_not_for_what_they_are_held_against(seed):
    class Shared(list):
        def __deepcopy__(self, memo: Any) -> "Shared":
            return self

    cudnn, seen = torch.backends.cudnn, Shared()
    before = cudnn.benchmark, cudnn.deterministic

    def watched(model, batch):
        seen.append((cudnn.benchmark, cudnn.deterministic))
        return loss(model, batch)

    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(watched, model, optimizer, precision="bf16", backend="eager")
    for batch in batches(seed, count=2, last=6):
        step(batch)
    assert seen == [(False, True), (True, False), (True, False)]
    assert (cudnn.benchmark, cudnn.deterministic) == before


def _awake(model: nn.Module) -> None:
    nn.init.normal_(model.get_parameter("1.weight"), generator=torch.Generator().manual_seed(5))


def test_what_zero_weights_hide_of_a_compiled_loss_shows_on_others(monkeypatch, seed):
    def right(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return (model[1](model[0](batch)) - 1).square().mean()

    def without_gradient_of_the_first(model: Any, batch: torch.Tensor) -> torch.Tensor:
        hidden = model[0](batch)
        return (model[1](hidden.detach() + 0 * hidden) - 1).square().mean()

    def made(compiled: Any, awaken: Any) -> tuple[nn.Module, TrainStep]:
        monkeypatch.setattr(train_step_module, "compiled", lambda body: replace(body, loss=compiled))
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        nn.init.zeros_(model.get_parameter("1.weight"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, TrainStep(right, model, optimizer, backend="compile", randomize_zeros=awaken)

    batch = torch.randn(5, 3)
    _, unseen = made(without_gradient_of_the_first, None)
    unseen(batch)
    model, seen = made(without_gradient_of_the_first, _awake)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StepError, match="backend=compile, other weights: the gradients differ most at 0"):
        seen(batch)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert seen.made == 0
    weights = []
    for awaken in (None, _awake):
        model, step = made(right, awaken)
        step(batch)
        step(batch)
        weights.append(list(model.parameters()))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert step.errors["backend=compile, other weights"] < 1e-6


def test_a_guards_verdict_ends_with_its_step(seed):
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    verdict = lambda *_: (torch.tensor(True), torch.tensor(3.0))  # noqa: E731
    first, *more = batches(seed, last=6)
    TrainStep(loss, model, optimizer, guard=verdict, backend="eager")(first)
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step = TrainStep(loss, model, optimizer, backend="eager")
    for batch in more:
        step(batch)
        plain.zero_grad()
        loss(other, batch)[0].backward()
        plain.step()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)


def test_a_rate_that_is_set_later_is_that_of_torchs_schedules(seed):
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(loss, model, optimizer, backend="eager")
    assert "initial_lr" not in optimizer.state_dict()["param_groups"][0]
    optimizer.param_groups[0]["lr"] = 0.02
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda made: 1 / (1 + made))
    rates = []
    for batch in batches(seed, count=3, last=6):
        rates.append(optimizer.param_groups[0]["lr"])
        step(batch)
        schedule.step()
    assert rates == pytest.approx([0.02, 0.01, 0.02 / 3])


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_a_metric_of_some_micro_batches_is_the_mean_over_those(backend, seed):
    model = network(seed)

    def sometimes(model: nn.Module, batch: Any) -> Any:
        value, metrics = loss(model, batch)
        return value, metrics | ({"late": batch["x"].mean()} if len(batch["x"]) == 3 else {})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(sometimes, model, optimizer, accumulate=3, backend=backend, check_first_step=False)
    for batch in batches(seed, count=6, size=8, last=8):  # in parts of 2, 3 and 3
        assert step(batch)["late"] == pytest.approx(batch["x"][2:].mean().item(), abs=1e-6)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("backend", ["eager", "compile", "graph"])
def test_metrics_keep_fp64_and_may_be_numbers(backend, seed):
    model = network(seed)

    def with_number(model: nn.Module, batch: Any) -> Any:
        value, metrics = loss(model, batch)
        metrics = {"half": metrics["worst"].half()} | ({} if backend == "graph" else {"size": len(batch["x"])})
        return value, metrics

    step = TrainStep(with_number, model, torch.optim.SGD(model.parameters(), lr=0.125), backend=backend)
    for batch in batches(seed, count=6, last=6):
        with torch.no_grad():
            expected = loss(copy.deepcopy(model), batch)[0]
        metrics = step(batch)
        assert metrics["loss"].dtype == torch.float64
        assert metrics["half"].dtype == torch.float32
        assert metrics["loss"].item() == pytest.approx(expected.item(), rel=1e-12)
        assert backend == "graph" or metrics["size"] == 6


@pytest.mark.usefixtures("recorded")
def test_a_number_as_a_metric_is_not_recorded(seed):
    model = network(seed)
    counted = lambda model, batch: (loss(model, batch)[0], {"size": len(batch["x"])})  # noqa: E731
    step = TrainStep(counted, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="graph")
    given = batches(seed, count=4, last=6)
    for batch in given[:3]:
        step(batch)
    with pytest.raises(StepError, match="a captured step: the metric size is a Python number"):
        step(given[3])


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("nesterov", "hooked"), [(True, False), (False, True), (False, False)])
def test_gradients_that_an_optimizer_overwrites_are_not_compared_after_it(nesterov, hooked, seed):
    model = network(seed)
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "foreach": True} if nesterov else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    if hooked:

        def other(*_: Any) -> None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5).add_(1)

        optimizer.register_step_pre_hook(other)
    for backend, form in (("compile", "usual shapes"), ("graph", "recorded")):
        step = TrainStep(loss, model, optimizer, clip=0.5, backend=backend)
        for batch in batches(seed, count=5, last=6):
            step(batch)
        assert step.errors[f"backend={backend}, {form}"] < 1e-6


def test_what_auto_undoes_returns_to_groups_attributes_and_weights_elsewhere(monkeypatch, seed):
    def failing(body: Any) -> Any:
        def harmful(model: nn.Module, batch: Any) -> Any:
            loss(model, batch)
            optimizer.param_groups[0]["d"] += 5
            model.calls += 7  # pyright: ignore[reportOperatorIssue, reportAttributeAccessIssue]
            with torch.no_grad():
                head.add_(1)
                model.spread.add_(0)  # pyright: ignore[reportCallIssue]
            raise RuntimeError("on purpose")

        return replace(body, loss=harmful)

    monkeypatch.setattr(train_step_module, "compiled", failing)
    found = []
    for backend in ("auto", "eager"):
        head, model = nn.Parameter(torch.ones(3, dtype=torch.float64)), network(seed)
        model.calls = 0  # pyright: ignore[reportArgumentType]
        model.register_buffer("spread", torch.ones(1).expand(4))
        optimizer = torch.optim.SGD([*model.parameters(), head], lr=0.1, momentum=0.9)
        optimizer.param_groups[0]["d"] = 1
        with_head = lambda model, batch, head=head: loss(model, batch | {"y": batch["y"] + head})[0]  # noqa: E731
        step = TrainStep(with_head, model, optimizer, backend=backend, check_first_step=False, log=lambda _: None)
        for batch in batches(seed, count=18, last=6):
            step(batch)
        found.append([head, *model.parameters(), optimizer.param_groups[0]["d"], model.calls])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("gate", [True, False])
def test_a_clip_that_leaves_parameters_to_another_optimizer_says_so(gate, seed):
    model, said = network(seed), list[str]()
    last = torch.optim.SGD(model.get_submodule("3").parameters(), lr=0.1)
    TrainStep(loss, model, last, clip=0.1, backend="eager", check_first_step=gate, log=said.append)
    TrainStep(loss, model, last, backend="eager", check_first_step=gate, log=said.append)
    [line] = said
    assert "clip: 0.weight and 3 more are not in the optimizer: they are neither clipped nor in grad_norm" in line
