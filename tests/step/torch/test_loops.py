"""Loops as people write them: `TrainStep` leaves the same weights, optimizer state and scale."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.step.torch import Accumulation, Averages, Clip, TrainStep
from fullstride.step.torch import train_step as train_step_module
from fullstride.step.torch.explanation import compilations
from fullstride.step.torch.runners import backends as backends_module
from fullstride.step.torch.runners.backends import check_backend, with_own_code
from fullstride.step.torch.runners.comparison import StepError
from tests.step.torch.loops import (
    LOOPS,
    adamw,
    by_hand,
    by_step,
    made,
    mean_of_tokens,
    network,
    squared,
    step_of,
    words,
)
from tests.step.torch.networks import OnHost, Rerun


@pytest.fixture
def recorded(monkeypatch):
    """`graph` on the host, where what is captured runs again."""
    monkeypatch.setattr(backends_module, "GraphRunner", OnHost)
    monkeypatch.setattr(train_step_module, "check_backend", lambda *_: None)
    monkeypatch.setattr(Rerun, "recorded", 0)


@pytest.mark.parametrize("name", LOOPS)
def test_eager_steps_are_those_of_the_loop_to_the_last_bit(name, seed):
    found, _ = by_step(LOOPS[name], seed, backend="eager")
    rtol, atol = (0, 0) if LOOPS[name].exact else (1e-5, 1e-6)
    torch.testing.assert_close(found, by_hand(LOOPS[name], seed), rtol=rtol, atol=atol)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.captured])
def test_captured_steps_are_those_of_the_loop(name, seed):
    found, step = by_step(LOOPS[name], seed, backend="graph")
    torch.testing.assert_close(found, by_hand(LOOPS[name], seed), rtol=1e-5, atol=1e-6)
    assert Rerun.recorded == 1
    assert max(step.errors.values()) < (1e-2 if name.startswith("fp16") else 1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch itself ignores
@pytest.mark.parametrize("name", ["graph breaks"])
def test_compiled_steps_are_those_of_the_loop_to_rounding(name, seed):
    found, step = by_step(LOOPS[name], seed, backend="compile")
    torch.testing.assert_close(found, by_hand(LOOPS[name], seed), rtol=1e-4, atol=1e-5)
    assert step.errors
    [once] = step.explain().compilations
    assert (once.seconds > 0, once.cause) == (True, "")
    assert "compiled: " in str(step.explain())


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if not loop.compiled])
def test_what_only_eager_can_do_is_refused_elsewhere(name, seed):
    training = made(LOOPS[name], seed)
    with pytest.raises(ValueError, match=r"backend=eager"):
        step_of(training, backend="compile")(training.batches[0])
    said = list[str]()
    step = step_of(training, log=said.append)
    for batch in training.batches * 6:
        step(batch)
    assert step.backend == "eager"
    assert said[-1].startswith("backend=auto: eager")


@pytest.mark.parametrize("weight", [lambda batch: (batch["labels"] != -100).sum(), "tokens"])
def test_accumulation_by_tokens_is_the_whole_batch_and_not_the_mean_of_means(weight, seed):
    torch.manual_seed(seed)
    training = words("cpu", weight)
    step = step_of(training, backend="eager")
    for batch in training.batches:
        batch["labels"][:2, 0] = 3  # a mean of means has no token of the first micro-batch to be the mean of
        whole, halves = copy.deepcopy(training.model), copy.deepcopy(training.model)
        (value := mean_of_tokens(whole, batch)).backward()
        metrics = step(batch)
        assert metrics["loss"].item() == pytest.approx(value.item(), rel=1e-5)
        for p, q in zip(training.model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
        parts = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2, 4)]
        torch.stack([mean_of_tokens(halves, part) for part in parts]).mean().backward()
        wrong, right = (next(m.parameters()).grad for m in (halves, whole))
        assert wrong is not None
        assert right is not None
        assert (wrong - right).norm() > 0.05 * right.norm()
        if weight == "tokens":
            assert metrics["tokens"] == (batch["labels"] != -100).sum()
            assert metrics["one"] == 1


def test_a_batch_without_tokens_moves_nothing_by_its_gradient(seed):
    torch.manual_seed(seed)
    training = words("cpu", "tokens")
    step = step_of(training, backend="eager")
    metrics = step({k: torch.full_like(v, -100) if k == "labels" else v for k, v in training.batches[0].items()})
    assert metrics["loss"].isnan()
    assert metrics["grad_norm"] == 0


def test_weights_that_are_none_are_told(seed):
    torch.manual_seed(seed)
    training = words("cpu", "count")
    with pytest.raises(
        ValueError, match=r"accumulate: the loss returned the metrics \['one', 'tokens'\], expected count"
    ):
        step_of(training, backend="eager")(training.batches[0])
    each = Accumulation(2, lambda batch: batch["labels"].float())
    with pytest.raises(ValueError, match=r"accumulate: a weight of shape \(3, 7\) and torch.float32, expected a real"):
        step_of(training, backend="eager", accumulate=each)(training.batches[0])
    with pytest.raises(ValueError, match="accumulate is 0"):
        Accumulation(0)


@pytest.mark.parametrize("given", [{}, {"value": 0.0}, {"norm": -1.0, "value": 1.0}])
def test_a_clip_without_a_limit_is_refused(given):
    with pytest.raises(ValueError, match="clip: norm is .* and value .*, expected one above 0"):
        Clip(**given)


def test_a_scale_is_halved_until_gradients_are_finite_and_grows_after_that(seed):
    training = made(LOOPS["fp16"], seed)
    step, scales, moved = step_of(training, backend="eager"), [2.0**20], list[bool]()
    for batch in training.batches:
        before = training.model.get_parameter("0.weight").clone()
        step(batch)
        moved.append(not torch.equal(before, training.model.get_parameter("0.weight")))
        scales.append(training.options["scaler"].get_scale())
    assert not moved[0]
    factors = [b / a for a, b in itertools.pairwise(scales)]
    assert all(moves == (factor >= 1) for moves, factor in zip(moved, factors, strict=True))
    assert (factors[0], max(factors)) == (0.5, 2)
    assert list(step.errors) == ["backend=eager, usual shapes"]  # compared once a step was finite
    assert step.scaler is not None
    kept = step.scaler.state_dict()
    other = step_of(made(LOOPS["fp16"], seed), scaler=None, backend="eager")
    assert other.scaler is not None
    other.scaler.load_state_dict(kept)
    assert other.scaler.state_dict() == kept


@pytest.mark.usefixtures("recorded")
def test_a_scale_goes_on_within_a_captured_step(seed):
    training = made(LOOPS["fp16"], seed)
    step, scaler = step_of(training, backend="graph"), training.options["scaler"]
    for batch in training.batches:
        step(batch)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**30})
    before = training.model.get_parameter("0.weight").clone()
    step(training.batches[0])
    torch.testing.assert_close(training.model.get_parameter("0.weight"), before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0**29


def test_options_that_exclude_each_other_are_refused(seed):
    torch.manual_seed(seed)
    model = network("cpu")
    optimizer, part = adamw(model.parameters()), adamw(model[0].parameters())  # pyright: ignore[reportIndexIssue]
    guard = lambda loss, norm: loss.isnan()  # noqa: E731

    def refused(optimizer: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as told:
            TrainStep(squared, model, optimizer, **options)
        return str(told.value)

    assert "guard and scaler (precision=fp16) both skip steps" in refused(optimizer, precision="fp16", guard=guard)
    assert "scaler: 2.weight is not in the optimizer" in refused(part, precision="fp16")
    assert "randomize_zeros: " in refused(optimizer, precision="fp16", randomize_zeros=nn.Module.zero_grad)
    assert "AdamW and AdamW share 2 parameters, expected each in one" in refused([optimizer, part])
    assert "an empty list of optimizers" in refused([])
    lbfgs = torch.optim.LBFGS(model[2].parameters())  # pyright: ignore[reportIndexIssue]
    assert "LBFGS steps by a closure and is one of 2 optimizers, expected it alone" in refused([part, lbfgs])
    assert "scaler: LBFGS steps by a closure" in refused(torch.optim.LBFGS(model.parameters()), precision="fp16")
    assert "precision=fp61: expected one of fp16" in refused(optimizer, precision="fp61")
    with pytest.raises(ConfigError, match="backend=graph with a scaler: Adamax does not skip steps"):
        check_backend("graph", torch.device("cuda"), torch.optim.Adamax(model.parameters(), capturable=True), True)


def test_a_loss_that_cannot_be_one_graph_is_refused_unless_breaks_are_allowed(seed):
    with pytest.raises(StepError, match=r"backend=compile: the loss is not one graph \(.*use fullgraph=False, or"):
        by_step(LOOPS["graph breaks"], seed, backend="compile", fullgraph=True)


@pytest.mark.usefixtures("recorded")
def test_a_wrong_gradient_shows_though_it_is_clipped_by_value(monkeypatch, seed):
    torch.manual_seed(seed)
    model = network("cpu")
    optimizer = adamw(model.parameters())
    step = TrainStep(squared, model, optimizer, clip=Clip(value=0.01), backend="graph")
    batch = {"x": torch.randn(6, 5), "y": torch.randn(6, 3)}
    for _ in range(3):
        step(batch)
    replayed = OnHost._replay

    def wrong(self: Any, batch: Any, made: int) -> Any:
        metrics = replayed(self, batch, made)
        self._recorded[0].neg_()
        return metrics

    monkeypatch.setattr(OnHost, "_replay", wrong)
    with pytest.raises(StepError, match=r"the gradients differ most at 0\.weight"):
        step(batch)


def test_a_step_explains_itself_once_it_is_timed(seed):
    training = made(LOOPS["clip by value"], seed)
    averages = Averages(training.model, [0.9])
    step = step_of(training, backend="eager", precision="bf16", ema=averages)
    early = step.explain()
    assert (early.backend, early.why, early.errors, early.host_ms) == ("eager", "named", {}, None)
    for batch in training.batches * 2:
        step(batch)
    found, size = step.explain(), 4 * sum(p.numel() for p in training.model.parameters())
    assert found.errors == step.errors
    assert 0 < found.errors["backend=eager, usual shapes"] < found.allowed
    assert found.host_ms is not None
    assert found.host_ms > 0
    assert found.device_ms is None
    counts = 4 * len(list(training.model.parameters()))  # AdamW's steps
    assert dict(found.bytes) == {"weights": size, "optimizer": 2 * size + counts, "averages": size}
    assert step._make == step._step  # nothing is timed any longer


def test_auto_explains_its_choice(seed):
    training = made(LOOPS["sparse SGD"], seed)
    step = step_of(training, log=lambda _: None)
    step(training.batches[0])
    assert step.explain().why.startswith("auto still measures")
    for batch in training.batches * 5:
        step(batch)
    found = step.explain()
    assert found.why.startswith("the fastest of auto: eager ")
    assert "compile: StepError: 0.weight has a sparse gradient" in found.why
    assert found.notes[-1].startswith("backend=auto: eager (")
    assert str(found).splitlines()[0] == f"backend: eager ({found.why})"


def test_each_compilation_has_its_cause():
    function = with_own_code(lambda x, n: (x * n).sum())
    compiled = torch.compile(function, backend="eager", dynamic=False)
    for size, factor in ((3, 2), (4, 2), (4, 3)):
        compiled(torch.ones(size), factor)
    causes = [each.cause for each in compilations(function.__name__)]
    assert causes[0] == ""
    assert "expected 3, actual 4" in causes[1]
    assert "== 2" in causes[2]


@pytest.mark.usefixtures("recorded")
def test_a_state_that_one_of_two_optimizers_loads_is_captured_anew(seed):
    training = made(LOOPS["two optimizers"], seed)
    step = step_of(training, backend="graph")
    for batch in training.batches:
        step(batch)
    assert Rerun.recorded == 1
    last = training.optimizers[1]
    last.load_state_dict(copy.deepcopy(last.state_dict()))
    for batch in training.batches:
        step(batch)
    assert Rerun.recorded == 2


class Forwarding(torch.optim.Optimizer):
    """A wrapper that has what it wraps by name, and not what is set on it."""

    def __init__(self, inner: torch.optim.Optimizer):  # as many do, without torch's
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inner.step()


def test_a_wrapper_that_would_not_hand_on_a_guards_verdict_is_refused(seed):
    torch.manual_seed(seed)
    model = network("cpu")
    optimizer = Forwarding(torch.optim.AdamW(model.parameters(), fused=True))
    with pytest.raises(ConfigError, match="guard: Forwarding does not skip steps on the device"):
        TrainStep(squared, model, optimizer, guard=lambda loss, _: loss.isnan())
