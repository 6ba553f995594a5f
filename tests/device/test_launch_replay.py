"""Repeated calls of the fused ops: right for other tensors of the same kind, and of every other kind."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.device import launch_replay
from fullstride.device.launch_replay import Replayed
from fullstride.jvp.attention.register import ATTENTION, VARLEN
from fullstride.jvp.dual_op import DualOp
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM

STARTS = torch.tensor([0, 3, 7], dtype=torch.int32)
SCORES = (0.3, False, -1, -1, "")
Q = (2, 3, 5, 16)
# The op, shapes of its primals, of its tangents, and its settings.
CASES: dict[str, tuple[DualOp, list[Any], list[Any], tuple[Any, ...]]] = {
    "group_norm": (GROUP_NORM, [(3, 6, 5), (6,), (6,)], [(3, 6, 5), (6,), None], (2, 1e-5, "silu", None)),
    "layer_norm": (LAYER_NORM, [(3, 5, 7), (7,), (7,)], [(3, 5, 7), None, None], (1e-5, None)),
    "rms_norm": (RMS_NORM, [(3, 7), (7,)], [(3, 7), (7,)], (1e-5, None)),
    "ada_layer_norm": (ADA_LAYER_NORM, [(3, 5, 7), (3, 7), (3, 7)], [(3, 5, 7), (3, 7), None], (1e-5, None)),
    "attention": (ATTENTION, [Q, Q, Q, None], [Q, Q, Q], SCORES),
    "masked": (ATTENTION, [Q, Q, Q, (2, 3, 5, 5)], [Q, None, Q], SCORES),
    "varlen": (VARLEN, [(7, 2, 16)] * 3 + [STARTS, STARTS], [(7, 2, 16)] * 3, (4, 4, *SCORES)),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    for op, *_ in CASES.values():
        for name in ("_replayed_forward", "_replayed_backward"):
            monkeypatch.setattr(getattr(op, name), "_kinds", {})


def drawn(shapes: list[Any]) -> list[Any]:
    return [torch.randn(shape) if isinstance(shape, tuple) else shape for shape in shapes]


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def both(name: str, tensors: list[Any]) -> tuple[Any, Any]:
    """Forward and backward by kernels, compared with PyTorch operations in fp64 that were rounded at the end."""
    op, _, _, settings = CASES[name]
    outs, expected = (op.run(*tensors, *settings, how) for how in ("triton", "plain"))
    close(outs, expected)
    given = *drawn([tuple(x.shape) for x in outs[:2]]), *tensors
    kept = outs if op.keeps_output else [None, None, *outs[2:]]
    found, right = (op.gradients(*given, *kept, *settings, how, False) for how in ("triton", "plain"))
    close(found, right)
    return outs, found


def repeated(replayed: Replayed) -> list[bool]:
    return [not isinstance(kind, bool) for kind in replayed._kinds.values()]


@pytest.mark.parametrize("name", CASES)
def test_calls_of_one_kind_are_right_for_any_tensors(name, seed):
    torch.manual_seed(seed)
    op, primals, tangents, _ = CASES[name]
    made = [both(name, drawn([*primals, *tangents])) for _ in range(5)]
    tensors = [x for call in made for half in call for x in half if x is not None]
    assert len({x.data_ptr() for x in tensors}) == len(tensors)  # each has memory of its own
    assert repeated(op._replayed_forward) == repeated(op._replayed_backward) == [True]


def test_a_repeated_call_does_not_plan_again(seed, monkeypatch):
    torch.manual_seed(seed)
    op, primals, tangents, settings = CASES["attention"]
    for _ in range(2):
        both("attention", drawn([*primals, *tangents]))
    for replayed in (op._replayed_forward, op._replayed_backward):
        monkeypatch.setattr(replayed, "_run", lambda *_: pytest.fail("planned again"))
    both("attention", drawn([*primals, *tangents]))
    with pytest.raises(pytest.fail.Exception):  # another kind
        op.run(*drawn([*primals, *tangents]), 0.7, *settings[1:], "triton")


def test_a_tensor_given_twice_is_not_taken_for_two(seed):
    torch.manual_seed(seed)
    x, t = torch.randn(2, *Q)
    for _ in range(3):
        both("attention", [x, x, x, None, t, t, t])
    both("attention", drawn([Q, Q, Q, None, Q, Q, Q]))
    both("attention", [x, torch.randn(Q), x, None, t, t, torch.randn(Q)])
    assert repeated(ATTENTION._replayed_forward) == [True]


def views() -> list[Tensor]:
    """Images of one shape that lie differently in memory; the last two start between multiples of 16 bytes."""
    wide = torch.randn(3, 5, 6).transpose(1, 2)
    return [torch.randn(3, 6, 5), wide, torch.randn(6, 6, 5)[::2], torch.randn(91)[1:].view(3, 6, 5), wide[:, :, :5]]


def test_every_layout_is_a_kind_of_its_own(seed):
    torch.manual_seed(seed)
    for _ in range(4):
        for x, t in zip(views(), reversed(views()), strict=True):
            both("group_norm", [x, *drawn([(6,), (6,)]), t, *drawn([(6,), None])])


def test_other_settings_of_the_process_are_another_kind(seed):
    torch.manual_seed(seed)
    before = torch.are_deterministic_algorithms_enabled()
    _, primals, tangents, _ = CASES["attention"]
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            for _ in range(3):
                both("attention", drawn([*primals, *tangents]))
    finally:
        torch.use_deterministic_algorithms(before)
    assert repeated(ATTENTION._replayed_forward) == [True, True]


class Seen(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_a_repeated_call_would_hide(seed):
    torch.manual_seed(seed)
    op, primals, tangents, settings = CASES["layer_norm"]
    for _ in range(3):
        both("layer_norm", drawn([*primals, *tangents]))
    with Seen() as seen:
        op.run(*drawn([*primals, *tangents]), *settings, "triton")
    assert "aten.empty.memory_format" in seen.names


def test_kinds_that_never_come_back_are_forgotten(monkeypatch, seed):
    monkeypatch.setattr(launch_replay, "MOST_KINDS", 3)
    torch.manual_seed(seed)
    replayed = Replayed(lambda x: (torch.empty_like(x),))
    for n in range(1, 9):
        assert replayed(torch.randn(n))[0].shape == (n,)
        assert len(replayed._kinds) <= 3


def test_what_computes_besides_its_kernels_is_not_repeated(seed):
    torch.manual_seed(seed)
    for run in (lambda x: (x * 2,), lambda x: (x[1:],), lambda x: (torch.full_like(x, 3),)):
        replayed = Replayed(run)
        for _ in range(4):
            x = torch.randn(5)
            torch.testing.assert_close(replayed(x), run(x), rtol=0, atol=0)
        assert repeated(replayed) == [False]
