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

STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)
SCORES = (0.3, False, -1, -1, "")
Q = (1, 2, 3, 16)
# The op, shapes of its primals, of its tangents, and its settings.
CASES: dict[str, tuple[DualOp, list[Any], list[Any], tuple[Any, ...]]] = {
    "group_norm": (
        GROUP_NORM,
        [(2, 6, 5), (2, 6), (6,), (6,)],
        [(2, 6, 5), (2, 6), (6,), None],
        (2, 1e-5, "silu", None),
    ),
    "layer_norm": (LAYER_NORM, [(2, 7), (7,), (7,)], [(2, 7), None, None], (1e-5, None)),
    "rms_norm": (RMS_NORM, [(2, 7), (7,)], [(2, 7), (7,)], (1e-5, None)),
    "ada_layer_norm": (ADA_LAYER_NORM, [(2, 2, 7), (2, 7), (2, 7)], [(2, 2, 7), (2, 7), None], (1e-5, None)),
    "attention": (ATTENTION, [Q, Q, Q, None], [Q, Q, Q], SCORES),
    "masked": (ATTENTION, [Q, Q, Q, (1, 2, 3, 3)], [Q, None, Q], SCORES),
    "varlen": (VARLEN, [(5, 1, 16)] * 3 + [STARTS, STARTS], [(5, 1, 16)] * 3, (3, 3, *SCORES)),
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
    made = [both(name, drawn([*primals, *tangents])) for _ in range(3)]
    tensors = [x for call in made for half in call for x in half if x is not None]
    assert len({x.data_ptr() for x in tensors}) == len(tensors)  # each has memory of its own
    assert repeated(op._replayed_forward) == repeated(op._replayed_backward) == [True]


def test_a_repeated_call_does_not_plan_again(seed, monkeypatch):
    torch.manual_seed(seed)
    op, primals, tangents, settings = CASES["rms_norm"]
    for _ in range(2):
        both("rms_norm", drawn([*primals, *tangents]))
    for replayed in (op._replayed_forward, op._replayed_backward):
        monkeypatch.setattr(replayed, "_run", lambda *_: pytest.fail("planned again"))
    both("rms_norm", drawn([*primals, *tangents]))
    with pytest.raises(pytest.fail.Exception):  # another kind
        op.run(*drawn([*primals, *tangents]), 1e-3, *settings[1:], "triton")


def test_a_tensor_given_twice_is_not_taken_for_two(seed):
    torch.manual_seed(seed)
    x, w = torch.randn(2, 7), torch.randn(7)
    for _ in range(3):
        both("rms_norm", [x, w, x, w])
    both("rms_norm", drawn([(2, 7), (7,), (2, 7), (7,)]))
    both("rms_norm", [x, w, torch.randn(2, 7), w])
    assert repeated(RMS_NORM._replayed_forward) == [True]


def views() -> list[Tensor]:
    """Images of one shape that lie differently in memory; one starts between multiples of 16 bytes."""
    wide = torch.randn(2, 5, 4).transpose(1, 2)
    return [torch.randn(2, 4, 5), wide, torch.randn(41)[1:].view(2, 4, 5)]


def test_every_layout_is_a_kind_of_its_own(seed):
    torch.manual_seed(seed)
    for _ in range(3):
        for x, t in zip(views(), reversed(views()), strict=True):
            both("group_norm", [x, *drawn([(2, 4), (4,), (4,)]), t, *drawn([None, (4,), None])])
    # A transposed one is copied first, by repeated calls, too.
    assert repeated(GROUP_NORM._replayed_forward) == repeated(GROUP_NORM._replayed_backward) == [True] * 3


def test_other_settings_of_the_process_are_another_kind():
    factor = 1
    replayed = Replayed(lambda x: (torch.empty(len(x) * factor),))
    for factor in (2, 3, 2, 2, 3, 3, 2):
        (found,) = replayed(torch.randn(5), state=factor)
        assert found.shape == (5 * factor,)
    assert repeated(replayed) == [True, True]
    before = ATTENTION.state()
    torch.use_deterministic_algorithms(True)
    try:
        assert ATTENTION.state() != before
    finally:
        torch.use_deterministic_algorithms(False)


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


def test_kernels_read_no_lazily_negated_tensor(seed, monkeypatch):
    torch.manual_seed(seed)
    run = launch_replay.launch

    def launch(kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        assert not any(isinstance(x, Tensor) and x.is_neg() for x in arguments)
        run(kernel, grid, arguments, options)

    monkeypatch.setattr(launch_replay, "launch", launch)
    op, primals, tangents, settings = CASES["attention"]
    for lazy in (False, False, True):
        parts: list[Any] = [s and torch.randn(s, dtype=torch.cfloat) for s in (*primals, *tangents, Q)]
        tensors: list[Any] = [z if z is None else (z.conj() if lazy else z).imag for z in parts]
        g = tensors.pop()
        assert g.is_neg() == lazy
        outs, _ = both("attention", tensors)
        found, right = (op.gradients(g, g.sin(), *tensors, *outs, *settings, how, False) for how in ("triton", "plain"))
        close(found, right)


def test_what_computes_besides_its_kernels_is_not_repeated(seed):
    torch.manual_seed(seed)
    for run in (lambda x: (x * 2,), lambda x: (x[1:],), lambda x: (torch.full_like(x, 3),)):
        replayed = Replayed(run)
        for _ in range(4):
            x = torch.randn(5)
            torch.testing.assert_close(replayed(x), run(x), rtol=0, atol=0)
        assert repeated(replayed) == [False]
