from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from fullstride.jvp.attention.register import ATTENTION, VARLEN
from fullstride.jvp.dual_op import DualOp
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM

SCORES = (0.5, True, -1, -1, "", "plain")
STARTS = torch.tensor([0, 2, 6], dtype=torch.int32)
ROWS = [(2, 5, 7), (7,), (7,)]
MASK = torch.ones(2, 4, 5, 5, dtype=torch.bool).tril()
# The op, the shapes of its tensors or constants that are not differentiated, those of the tangents, its settings.
CASES: dict[str, tuple[DualOp, list, list, tuple]] = {
    "attention": (ATTENTION, [(2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 3), MASK], [0, 1, 2], SCORES),
    "attention_window": (
        ATTENTION,
        [(2, 4, 5, 6), (2, 4, 7, 6), (2, 4, 7, 6), None],
        [0, 1, 2],
        (0.3, False, 2, 1, "", "plain"),
    ),
    "attention_varlen": (VARLEN, [(6, 4, 6), (6, 2, 6), (6, 2, 3), STARTS, STARTS], [0, 1, 2], (4, 4, *SCORES)),
    "layer_norm": (LAYER_NORM, ROWS, [0, 1, 2], (1e-5, None, "plain")),
    "layer_norm_alone": (LAYER_NORM, [(2, 5, 7), None, None], [0, None, None], (1e-5, None, "plain")),
    "rms_norm": (RMS_NORM, ROWS[:2], [0, 1], (1e-5, None, "plain")),
    "ada_layer_norm": (ADA_LAYER_NORM, [(2, 5, 7), (2, 7), (2, 7)], [0, 1, 2], (1e-5, None, "plain")),
    "group_norm": (GROUP_NORM, [(2, 6, 3, 5), (2, 6), (6,), (6,)], [0, 1, 2, 3], (3, 1e-5, "silu", None, "plain")),
}
ABSENCES = {"all": (), "only first": (1, 2, 3), "no first": (0,), "none": (0, 1, 2, 3)}


def arguments(name: str, absent: tuple[int, ...], through: bool, requires_grad: bool) -> tuple[DualOp, list]:
    """The operator's arguments, in order."""
    op, shapes, of, settings = CASES[name]
    g = torch.Generator().manual_seed(0)

    def made(shape):
        if not isinstance(shape, tuple):
            return shape
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_(requires_grad)

    primals = [made(shape) for shape in shapes]
    tangents = [None if i is None or i in absent else made(shapes[i]) for i in of]
    return op, [*primals, *tangents, *settings, through]


@pytest.mark.parametrize("through", [True, False], ids=["through", "detached"])
@pytest.mark.parametrize("absence", ABSENCES)
@pytest.mark.parametrize("name", CASES)
def test_the_operator_returns_what_the_op_does(name, absence, through):
    op, args = arguments(name, ABSENCES[absence], through, requires_grad=False)
    found = getattr(torch.ops.fullstride, op.name)(*args)
    expected = op.run(*args[:-1])
    assert len(found) == len(expected) == 2 + op.rows
    for x, like, empty in zip(found, expected, op.empty(*args[:-1]), strict=True):
        assert (like is None) == (empty is None)
        if like is None:
            assert x.numel() == 0
            continue
        assert empty is not None
        torch.testing.assert_close(x, like, rtol=0, atol=0)
        assert (empty.shape, empty.dtype, empty.stride()) == (like.shape, like.dtype, like.stride())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch 2.14
@pytest.mark.parametrize("absence", ["all", "only first", "none"])
@pytest.mark.parametrize("name", CASES)
def test_torch_finds_nothing_wrong_with_the_operator(name, absence):
    """Schema, fake tensors, autograd's registration, tracing."""
    op, args = arguments(name, ABSENCES[absence], absence != "only first", requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    opcheck(getattr(torch.ops.fullstride, op.name), tuple(args), test_utils=checks)


@pytest.mark.parametrize("through", [True, False], ids=["through", "detached"])
@pytest.mark.parametrize("name", CASES)
def test_its_gradients_are_those_of_the_eager_function(name, through):
    op, args = arguments(name, (1,), through, requires_grad=True)
    tensors = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    count = len(op.primals)
    tangents = args[count : count + len(op.tangents)]
    settings = args[count + len(op.tangents) : -1]
    eager: Any = op(args[:count], tangents, settings, through)
    operator = getattr(torch.ops.fullstride, op.name)(*args)[:2]
    found = []
    for o, to in (eager, operator):
        loss = o.sin().sum() + (to.cos().sum() if through else 0)
        found.append(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert all(x.any() for x in found[0][: 1 if not through else None])
    assert eager[1].requires_grad == through


def test_autocast_does_not_reach_inside():
    """bf16 products inside would leave an error of 1e-3."""
    op, args = arguments("attention", (), through=True, requires_grad=False)
    expected: Any = op.run(*args[:-1])[0]
    args = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    with torch.autocast("cpu", torch.bfloat16):
        found = getattr(torch.ops.fullstride, op.name)(*args)[0]
        also: Any = op.run(*args[:-1])[0]
    for x in (found, also):
        assert x.dtype == torch.float32
        assert (x - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_refused_and_not_taken_for_zero(name):
    op, args = arguments(name, (), through=True, requires_grad=True)
    tensors = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    output = getattr(torch.ops.fullstride, op.name)(*args)[0]
    first = torch.autograd.grad(output.sin().sum(), tensors, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=f"a second derivative .* {op.name}, which"):
        torch.autograd.grad(torch.cat([g.flatten() for g in first if g is not None]).norm(), tensors, allow_unused=True)
