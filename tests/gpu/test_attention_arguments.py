"""Arguments beyond SDPA's on a GPU against the definition in fp64, eager and compiled."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fullstride.device.precision import exact_fp32
from fullstride.jvp import attention, attention_dual, jvp
from tests.jvp.attention.closed_form import ROUNDING
from tests.jvp.attention.rules import CASES, H, defined, draw, numbers, places
from tests.jvp.derivatives import torchs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]


def there(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments on the device, numbers rounded to the format."""
    moved = {n: x.to(DEVICE) if hasattr(x, "to") else x for n, x in given.items()}
    return {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in moved.items()}


def rounded(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Leaves of the format, on the device."""
    return [x.to(DEVICE, dtype).requires_grad_() for x in tensors]


def outcome(pair: Any, leaves: list[Tensor], learned: list[Tensor], through: bool) -> list[Tensor]:
    """Output, its tangent, and the gradients of a loss of both, in fp64; `leaves` are q, k, v and their tangents."""
    o, to = pair(tuple(leaves[:3]), tuple(leaves[3:]))
    loss = (o.double() * (to.double().sin() if through else to.double().detach())).sum()
    found = torch.autograd.grad(loss, [*(leaves if through else leaves[:3]), *learned])
    return [x.detach().double() for x in (o, to, *found)]


def compare(
    op: Any, reference: Any, leaves: list[Tensor], learned: tuple[Tensor, Tensor] | None, compiled: bool
) -> None:
    """An op in a format and the definition in fp64, at the same rounded points."""
    of_op, of_reference = [] if learned is None else [learned[0]], [] if learned is None else [learned[1]]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    for through in (False, True):
        torch._dynamo.reset()
        pair: Any = functools.partial(jvp, op, tangent_grad=through)
        pair = torch.compile(pair, fullgraph=True) if compiled else pair
        expected = outcome(functools.partial(torchs, reference), exact, of_reference, through)
        with exact_fp32(leaves[0].device):
            found = outcome(pair, leaves, of_op, through)
        for i, (x, y) in enumerate(zip(found, expected, strict=True)):
            assert (x - y).norm() <= 16 * ROUNDING[leaves[0].dtype] * y.norm(), (through, i)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rules_are_those_of_the_definition(name, compiled, dtype):
    lengths, given, named = CASES[name](3)
    op = functools.partial(attention, **there(given, dtype))
    exact = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in there(named, dtype).items()
    }
    compare(
        op,
        functools.partial(defined, **exact),
        rounded([*draw(3, *lengths), *draw(13, *lengths)], dtype),
        None,
        compiled,
    )


def bias(x: Tensor) -> dict[str, Any]:
    return {"added": x}


def alibi(x: Tensor) -> dict[str, Any]:
    i, j = (at.to(x.device) for at in places(7, 7))
    return {"added": -x[:, None, None] * (i - j).abs()}


LEARNED = {
    "attn_mask": (bias, (H, 7, 7)),
    "alibi_slopes": (alibi, (H,)),
    "sinks": (lambda x: {"sinks": x}, (H,)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_biases_slopes_and_sinks_learn(name, compiled, dtype):
    named, shape = LEARNED[name]
    (learned,) = rounded([numbers(5, *shape).abs()], dtype)
    exact = learned.detach().double().requires_grad_()
    leaves = rounded([*draw(6, 7, 7), *draw(16, 7, 7)], dtype)
    op = lambda *x: attention(*x, **{name: learned})  # noqa: E731
    compare(op, lambda *x: defined(*x, **named(exact)), leaves, (learned, exact), compiled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_jagged_samples_are_attended_one_by_one(dtype):
    lengths = [3, 0, 37, 1]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    drawn = [numbers(i, sum(lengths), H, 16) for i in range(6)]
    leaves = rounded(drawn, dtype)

    def jagged(x: Tensor) -> Any:
        return torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2)

    def pair(primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> list[Tensor]:
        outs: Any = attention_dual(*map(jagged, (*primals, *tangents)), is_causal=True)
        return [x.transpose(1, 2).values() for x in outs]

    def one_by_one(*packed: Tensor) -> Tensor:
        samples = zip(*(x.split(lengths) for x in packed), strict=True)
        hidden = [torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1) for n in lengths]
        each = [
            defined(*(x.transpose(0, 1)[None] for x in xs), hidden=h) for xs, h in zip(samples, hidden, strict=True)
        ]
        return torch.cat([x[0].transpose(0, 1) for x in each])

    exact = [x.detach().double().requires_grad_() for x in leaves]
    with exact_fp32(leaves[0].device):
        found = outcome(pair, leaves, [], True)
    for x, y in zip(found, outcome(functools.partial(torchs, one_by_one), exact, [], True), strict=True):
        assert (x - y).norm() <= 16 * ROUNDING[dtype] * y.norm()
