import math

import pytest
import torch

from fullstride.meanflow.config.schema import GuardConfig
from fullstride.meanflow.training.guard import AVERAGED, SETTLED, Guard
from fullstride.step.torch import TrainStep

CPU = torch.device("cpu")


def judge(guard: Guard, norm: float, loss: float = 1.0) -> bool:
    skip, shrink = guard.judge(torch.tensor(loss), torch.tensor(norm))
    assert shrink == 1
    return bool(skip)


def shrunk(guard: Guard, norm: float) -> float:
    skip, shrink = guard.judge(torch.tensor(1.0), torch.tensor(norm))
    assert not skip
    return shrink.item()


def counts(guard: Guard) -> tuple[int, int, int]:
    return tuple(int(guard.tensors[k]) for k in ("accepted", "skipped", "skipped_in_a_row"))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_harmful_from_the_first_step_on(bad):
    guard = Guard(GuardConfig(), CPU)
    assert judge(guard, 1.0, loss=bad)
    assert judge(guard, bad)
    assert counts(guard) == (0, 2, 2)
    assert guard.judged() == (2, 0, 1)
    assert not judge(guard, 1.0)
    assert counts(guard) == (1, 2, 0)
    assert guard.tensors["mean_norm"].item() == 1.0


def test_a_spike_is_scaled_to_the_running_average_of_norms_without_one(seed):
    guard, generator = Guard(GuardConfig(spike=5.0), CPU), torch.Generator().manual_seed(seed)
    mean = 0.0
    for i in range(SETTLED + 50):
        norm = 2 + torch.rand((), generator=generator).item()
        assert not judge(guard, norm)
        mean += (norm - mean) / min(i + 1, AVERAGED)
    assert guard.tensors["mean_norm"].item() == pytest.approx(mean, rel=1e-5)
    for _ in range(20):  # as many in a row as there may be
        assert shrunk(guard, 5.01 * mean) == pytest.approx(5.01, rel=1e-4)
        assert not guard.exhausted()
    assert guard.tensors["mean_norm"].item() == pytest.approx(mean, rel=1e-5)
    assert shrunk(guard, 4.9 * mean) == 1
    assert guard.judged() == (0, 20, 0)
    assert counts(guard) == (SETTLED + 51, 0, 0)


def test_early_norms_and_a_spike_of_zero_judge_nobody():
    young, blind = Guard(GuardConfig(spike=2.0), CPU), Guard(GuardConfig(spike=0.0), CPU)
    for i in range(SETTLED):
        assert not judge(young, 10.0**i if i < 30 else 1.0)
    for _ in range(SETTLED + 1):
        judge(blind, 1.0)
    assert not judge(blind, 1e30)


def test_the_host_learns_of_skips_one_step_late_and_the_same_after_a_restart():
    guard = Guard(GuardConfig(max_skips=2), CPU)
    seen = []
    for norm in (1.0, math.nan, math.nan, math.nan):
        judge(guard, norm)
        seen.append(guard.exhausted())
    assert seen == [False, False, False, True]
    first = Guard(GuardConfig(max_skips=2), CPU)
    for norm in (1.0, math.nan, math.nan):
        judge(first, norm)
        assert not first.exhausted()
    second = Guard(GuardConfig(max_skips=2), CPU)
    second.load(first.tensors)
    judge(second, math.nan)
    assert second.exhausted()


def test_after_a_restored_checkpoint_it_counts_anew():
    guard = Guard(GuardConfig(max_skips=1), CPU)
    for norm in (math.nan, math.nan):
        judge(guard, norm)
        stopped = guard.exhausted()
    assert stopped
    guard.forget_skips()
    judge(guard, 1.0)
    assert not guard.exhausted()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_optimizer_takes_no_part_of_a_skipped_step(dtype, seed):
    """Update relies on this: with found_inf set, weights, moments and step count stay as they are."""
    torch.manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(7, dtype=dtype))
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.1, fused=True)
    p.grad = torch.randn(7, dtype=dtype)
    optimizer.step()
    before = [p.detach().clone(), *(v.clone() for v in optimizer.state[p].values())]
    p.grad = torch.full((7,), math.nan, dtype=dtype)
    optimizer.found_inf = torch.tensor(1.0)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()
    for a, b in zip(before, [p.detach(), *optimizer.state[p].values()], strict=True):
        assert torch.equal(a, b)
    p.grad = torch.ones(7, dtype=dtype)
    optimizer.found_inf = torch.tensor(0.0)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()
    assert (p != before[0]).all()


@pytest.mark.parametrize("clip", [None, 0.5, 30.0])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_spike_moves_the_weights_as_an_ordinary_gradient_of_its_direction(kind, clip, seed):
    """Beside the same steps by hand in fp64, with the gradient scaled to the average, or to the clip below it."""
    torch.manual_seed(seed)
    weights = torch.randn(7, 3, dtype=torch.float64)
    gradients = [torch.randn(7, 3, dtype=torch.float64) for _ in range(3)]
    mean = gradients[0].norm().item()
    gradients[1] *= 40 * mean / gradients[1].norm()
    model = torch.nn.Linear(3, 7, bias=False)
    with torch.no_grad():
        model.weight.copy_(weights)
    guard = Guard(GuardConfig(spike=20.0), CPU)
    guard.tensors["accepted"] += SETTLED
    guard.tensors["mean_norm"] += mean
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    loss = lambda model, batch: (model.weight * batch[0]).sum()  # noqa: E731
    step = TrainStep(loss, model, optimizer, clip=clip, guard=guard.judge, backend="eager", check_first_step=False)
    exact = torch.nn.Parameter(weights)
    by_hand = kind([exact], lr=0.1)
    for i, gradient in enumerate(gradients):
        step(gradient.float()[None])
        longest = min(mean if i == 1 else math.inf, clip or math.inf)
        exact.grad = gradient * min(1.0, longest / gradient.norm().item())
        by_hand.step()
    assert guard.judged() == (0, 1, 0)
    torch.testing.assert_close(model.weight.double(), exact, rtol=1e-4, atol=1e-5)
