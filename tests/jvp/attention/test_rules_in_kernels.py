"""Rules as the kernels take them, in Triton's interpreter, with outputs filled with NaN first."""

from typing import Any

import pytest
import torch

from fullstride.jvp.attention.backward import backward
from fullstride.jvp.attention.backward_table import BackwardConfig
from fullstride.jvp.attention.forward_table import ForwardConfig
from fullstride.jvp.attention.launch_forward import forward
from fullstride.jvp.attention.masking import Rules, Visible, what_is_seen, with_sinks
from tests.jvp.attention.rules import ALIKE, CASES, defined, draw, numbers
from tests.jvp.attention.test_launch_forward import poisoning

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; see tests/gpu"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter's loops
]

BACKWARD = (BackwardConfig("dq dtq", 16, 32, 4, 1), BackwardConfig("dk dtk dv dtv", 32, 16, 4, 1))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def resolved(given: dict[str, Any], tensors: list[Any]) -> tuple[list[Any], dict[str, Any], int]:
    """What the launchers are given, and how many keys are sinks."""
    given = dict(given)
    given.pop("enable_gqa", None)
    visible = Visible(given.pop("attn_mask", None), given.pop("is_causal", False), given.pop("window", None))
    rules = Rules(**given)
    q, k, v, tq, tk, tv = tensors
    seen, _ = what_is_seen([q, k, v], visible, rules, "triton")
    (k, v, tk, tv), seen = with_sinks(rules.sinks, [k, v, tk, tv], seen, q)
    mask = None if seen.mask is None else seen.mask.expand(*q.shape[:3], k.shape[2])
    options = {"scale": 5**-0.5, "mask": mask, "causal": seen.causal, "window": seen.window}
    return [q, k, v, tq, tk, tv], options, int(rules.sinks is not None)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in CASES]
)
def test_the_kernels_follow_the_rules(name, seed):
    lengths, given, named = CASES[name](seed)
    exact = [x.requires_grad_() for x in (*draw(seed, *lengths), *draw(seed + 10, *lengths))]
    o, to = torch.func.jvp(lambda *x: defined(*x, **named), tuple(exact[:3]), tuple(exact[3:]))  # pyright: ignore
    go, gto = numbers(seed + 1, *o.shape), numbers(seed + 2, *o.shape)
    expected = torch.autograd.grad((o * go).sum() + (to * gto).sum(), exact)
    low = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    tensors, options, sinks = resolved(low, [x.detach().float() for x in exact])
    outs = forward(*tensors, **options, config=ForwardConfig(16, 16, 4, 2))  # pyright: ignore
    found = backward(go.float(), gto.float(), *tensors, *outs, **options, config=BACKWARD)  # pyright: ignore
    cut: list[Any] = [found[0], found[1][:, :, sinks:], found[2][:, :, sinks:]]
    cut += [found[3], found[4][:, :, sinks:], found[5][:, :, sinks:]]
    results: list[Any] = [*outs[:2], *cut]
    for x, y in zip(results, (o, to, *expected), strict=True):
        torch.testing.assert_close(x.double(), y.detach(), rtol=2e-5, atol=2e-5)
