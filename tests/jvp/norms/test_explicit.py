import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride import jvp as package
from fullstride.jvp import ada_layer_norm_dual, attention_dual, group_norm_dual, layer_norm_dual, rms_norm_dual
from tests.jvp.derivatives import close, gradients, torchs
from tests.jvp.norms.test_op import CASES, draw, ops, weights_for


def pair_of(name: str, **keywords: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A case's norm in pair form, of (primals, tangents)."""
    op, _, settings = CASES[name]
    pair, keywords = getattr(package, f"{op}_dual"), settings | keywords
    groups = (keywords.pop("groups"),) if "groups" in keywords else ()

    def run(primals, tangents):
        missing = (2 if op == "rms_norm" else 3) - len(primals)
        x, *parameters = (*primals, *[None] * missing)
        return pair(x, *groups, *parameters, *tangents, *[None] * missing, **keywords)

    return run


def way(name: str, **keywords: Any) -> Callable:
    """Derive by the pair form in place of a transform; the op itself is unused."""
    return lambda _, primals, tangents: pair_of(name, **keywords)(primals, tangents)


def patterns(name: str) -> list[tuple[bool, ...]]:
    """Selections of tangents: each alone, all, all but the first."""
    count = len(CASES[name][1])
    alone = [tuple(i == j for j in range(count)) for i in range(count)]
    return list(dict.fromkeys([*alone, (True,) * count, *([(False,) + (True,) * (count - 1)] if count > 1 else [])]))


EVERY = [(name, there) for name in CASES for there in patterns(name)]


@pytest.mark.parametrize(("name", "there"), EVERY)
def test_values_and_gradients_are_those_of_plain_operations(name, there, seed):
    _, reference, _ = ops(name)
    primals = draw(name, seed)
    tangents = [t if is_there else None for t, is_there in zip(draw(name, seed + 10), there, strict=True)]
    close(pair_of(name)(primals, tangents), torchs(reference, primals, tangents))
    weights = weights_for(name, seed)
    for through in (True, False):
        expected = gradients(reference, torchs, primals, tangents, weights, through)
        close(gradients(reference, way(name, tangent_grad=through), primals, tangents, weights, through), expected)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "ada_layer_norm", "group_norm_silu"])
def test_gradcheck_through_output_and_tangent(name):
    points = tuple(x.requires_grad_() for s in (0, 10) for x in draw(name, s))
    half = len(points) // 2
    call: Any = lambda *x: pair_of(name)(x[:half], x[half:])  # noqa: E731
    assert gradcheck(call, points, fast_mode=True)


class Elements(TorchDispatchMode):
    """Mode that counts the elements that operations return: the memory traffic of elementary operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
        return out


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "ada_layer_norm", "group_norm", "group_norm_silu"])
def test_each_absent_tangent_leaves_its_work_out(name):
    primals, tangents = draw(name, 0), draw(name, 10)
    work = []
    for there in range(len(tangents), -1, -1):
        with Elements() as counted:
            pair_of(name, implementation="plain")(primals, [*tangents[:there], *[None] * (len(tangents) - there)])
        work.append(counted.count)
    assert work == sorted(work, reverse=True)
    assert len(set(work)) == len(work)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_without_a_tangent_it_is_the_librarys_and_has_none(name, dtype, seed):
    _, _, library = ops(name)
    primals = draw(name, seed, dtype=dtype)
    y, ty = pair_of(name)(primals, [None] * len(primals))
    assert torch.equal(y, library(*primals))
    assert ty is None


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "ada_layer_norm", "group_norm_silu"])
def test_without_gradient_of_the_tangent_nothing_of_it_is_kept(name, seed):
    primals, tangents = ([x.requires_grad_() for x in draw(name, s)] for s in (seed, seed + 10))
    kept: list[int] = []
    for tangent_grad in (True, False):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x.data_ptr()) or x, lambda x: x):
            y, ty = pair_of(name, tangent_grad=tangent_grad)(primals, tangents)
        assert y.requires_grad
        assert ty is not None
        assert ty.requires_grad is tangent_grad
        kept.append(sum(t.data_ptr() in saved for t in tangents))
    assert kept == [len(tangents), 0]


@pytest.mark.parametrize("last", [torch.channels_last, torch.contiguous_format], ids=str)
def test_both_outputs_of_a_group_norm_keep_the_memory_format(last, seed):
    x, tx = (draw("group_norm", s)[0].contiguous(memory_format=last) for s in (seed, seed + 10))
    for out in group_norm_dual(x, 3, tx=tx):
        assert out is not None
        assert out.is_contiguous(memory_format=last)


free = inspect.unwrap  # of the tests' own checks of shapes, which a user does not have
ROWS = torch.ones(2, 6, 8)
NOT_ALIKE: dict[str, tuple[Callable, str]] = {
    "shape": (lambda: free(layer_norm_dual)(ROWS, tx=ROWS[0]), r"a tangent is .*\(6, 8\) .*expected .*\(2, 6, 8\)"),
    "format": (
        lambda: free(rms_norm_dual)(ROWS, tx=ROWS.double()),
        "a tangent is torch.float64 .*expected torch.float32",
    ),
    "no primal": (
        lambda: free(layer_norm_dual)(ROWS, tx=ROWS, tbias=ROWS[0, 0]),
        "a primal and its tangent are NoneType",
    ),
    "modulation": (
        lambda: free(ada_layer_norm_dual)(ROWS, ROWS[:, 0], ROWS[:, 0], tscale=ROWS[:, :1]),
        r"a tangent is .*\(2, 1, 8\) .*expected .*\(2, 8\)",
    ),
    "groups": (lambda: free(group_norm_dual)(ROWS, 5, tx=ROWS), "groups is 5, expected a divisor of the 6 channels"),
    "act": (lambda: free(group_norm_dual)(ROWS, 2, tx=ROWS, act="relu"), "act is 'relu', expected None or 'silu'"),
    "attention": (
        functools.partial(free(attention_dual), *[ROWS[None]] * 3, tk=ROWS[None].double()),
        "a tangent is torch.float64",
    ),
}


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_a_tangent_that_is_not_like_its_primal_is_refused(name):
    call, message = NOT_ALIKE[name]
    with pytest.raises(ValueError, match=message):
        call()
