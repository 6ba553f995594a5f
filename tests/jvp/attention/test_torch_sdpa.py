from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fullstride.jvp import attention
from fullstride.jvp.attention import op
from fullstride.jvp.attention import torch_sdpa as library
from fullstride.jvp.attention.torch_sdpa import may_lose_gradients
from tests.jvp.attention.cases import draw
from tests.jvp.derivatives import close

BF16 = torch.bfloat16


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(library, "_sdpa_takes_cudnn", lambda: True)


def risky(queries=64, keys=64, dim=64, dtype=BF16, device="cuda", grad=True, mask=None, **shapes: Any) -> bool:
    with FakeTensorMode():
        q = torch.empty(2, 3, queries, dim, dtype=dtype, device=device, requires_grad=grad)
        k, v = (torch.empty(shapes.get("batch", 2), 3, keys, dim, dtype=dtype, device=device) for _ in range(2))
        seen = None if mask is None else torch.empty(queries, keys, dtype=dtype, device=device, requires_grad=mask)
        return may_lose_gradients(q, k, v, seen)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((64, 64), True), ((128, 128), False), ((128, 192), True), ((1, 128), True), ((256, 384), False), ((7, 5), True)],
    ids=str,
)
def test_gradients_are_at_risk_where_a_tile_is_not_full(lengths, expected, hopper):
    assert risky(*lengths) == expected


def test_nothing_is_at_risk_without_a_gradient_a_fused_kernel_or_cudnn(hopper, monkeypatch):
    assert risky()
    assert risky(mask=False)
    assert not risky(grad=False)
    with torch.no_grad():
        assert not risky()
    assert not risky(mask=True)
    assert not risky(dtype=torch.float32)
    assert not risky(device="cpu")
    assert not risky(dim=320)
    assert not risky(batch=1)
    monkeypatch.setattr(library, "_sdpa_takes_cudnn", lambda: False)
    assert not risky()


def test_gradients_at_risk_are_the_ops_own(monkeypatch, seed):
    monkeypatch.setattr(op, "may_lose_gradients", lambda *_: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    given = [x.requires_grad_() for x in draw(seed, "self")]
    out = attention(*given)
    exact = [x.detach().clone().requires_grad_() for x in given]
    expected = (exact[0] @ exact[1].mT * exact[0].shape[-1] ** -0.5).softmax(-1) @ exact[2]
    cotangent = torch.randn_like(out)
    close(out, expected)
    close(torch.autograd.grad(out, given, cotangent), torch.autograd.grad(expected, exact, cotangent))


@pytest.mark.parametrize(("length", "taken"), [(512, True), (576, False), (640, True), (1000, False)])
def test_the_backward_pass_past_the_tangent_is_cudnns_only_of_full_tiles(length, taken, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    q = torch.empty(1, 1, length, 64, dtype=BF16)
    assert (library._choose(q, q, q, causal=False, hopper=True) is library._cudnn) == taken
