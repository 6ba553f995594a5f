import pytest
import torch

from benchmarks.cases.meanflow import step_run as bench_step_run
from benchmarks.cases.meanflow.step_cases import Pass, StepCase
from fullstride.step.torch.runners.graph import WARM
from tests.benchmarks.cases.meanflow.quick_bench import bench, quick  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick")


class Again:
    """Stand-in for a CUDA graph: a replay calls the function again, with gradients in their first place."""

    scale = 1.0

    def __init__(self, function, generator):
        self._function, self._state = function, generator.get_state()
        self._generator, self._kept = generator, None

    def replay(self):
        result = self._function()
        return result * self.scale if isinstance(result, torch.Tensor) else tuple(x * self.scale for x in result)


@pytest.mark.parametrize(
    "make",
    [
        lambda loss: StepCase("step", loss),
        lambda loss: Pass("JVP", "jvp"),
        pytest.param(lambda loss: Pass("target", "target"), marks=pytest.mark.thorough),
    ],
)
def test_a_replay_is_compared_with_what_it_records(monkeypatch, make):
    monkeypatch.setattr(bench_step_run, "CudaGraph", Again)
    own = bench()
    own.run(make(own.setup.loss(1.0)), ("eager", "graph"))
    assert [row.extra["backend"] for row in own.rows] == ["eager", "graph"]
    assert own.left_out == []

    monkeypatch.setattr(Again, "scale", 1.5)
    other = bench()
    other.run(make(other.setup.loss(1.0)), ("graph",))
    (entry,) = other.left_out
    assert entry.why.startswith("GateError: replay: relative error")
    assert entry.wrong


def test_a_whole_step_moves_nothing_and_is_a_train_step():
    own = bench(full_step=True, averages=2)
    before = [p.detach().clone() for p in own.setup.model.parameters()]
    case = StepCase("step", own.setup.loss(0.5))
    call = case.start(own.setup, own.exact, 5).whole(compiling=False, graph=False)
    losses = [call().item() for _ in range(WARM + 2)]
    assert len(set(losses)) == len(losses)
    assert all(torch.equal(a, b) for a, b in zip(before, own.setup.model.parameters(), strict=True))
    own.run(case, ("eager",))
    assert own.rows[0].timing.median_ms > 0


def test_what_breaks_costs_the_rest_nothing_and_only_ours_is_a_fault():
    own = bench()

    def refuses(setup, loss):
        raise NotImplementedError("not  for\nthis")

    own.run(StepCase("theirs", own.setup.loss(1.0), refuses, ours=False), ("eager",))
    own.run(StepCase("mine", own.setup.loss(1.0), refuses), ("eager",))
    own.run(StepCase("step", own.setup.loss(1.0)), ("eager",))
    assert [(e.name, e.why, e.wrong) for e in own.left_out] == [
        ("theirs", "NotImplementedError: not for this", False),
        ("mine", "NotImplementedError: not for this", True),
    ]
    assert [row.extra["name"] for row in own.rows] == ["step"]


def test_a_wrong_function_is_judged_once_for_all_its_backends(monkeypatch):
    monkeypatch.setattr(bench_step_run, "CudaGraph", Again)
    own, made = bench(), []

    def wrong(setup, loss):
        made.append(loss)
        return lambda model, drawn: 2 * loss.at(model, **drawn)[0]

    own.run(StepCase("wrong", own.setup.loss(1.0), wrong), ("eager", "graph"))
    assert len(made) == 1
    assert [e.backend for e in own.left_out] == ["eager", "graph"]
    assert own.rows == []


def test_nothing_is_measured_twice():
    own = bench()
    for _ in range(2):
        own.run(Pass("forward", "forward"), ("eager",))
    own.run(Pass("forward", "forward", batch=3), ("eager",))
    assert [row.extra["batch"] for row in own.rows] == [5, 3]


def test_an_error_inside_a_derivative_leaves_no_level_behind():
    torch.autograd.forward_ad.enter_dual_level()
    bench_step_run.leave_forward_ad()
    assert torch.autograd.forward_ad._current_level == -1
