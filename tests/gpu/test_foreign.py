"""Models of diffusers and timm on a GPU: against fp64, compiled as in eager mode, and however TF32 was allowed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullstride.device.precision import exact_fp32
from fullstride.jvp import jvp, layer_norm, prepare
from fullstride.jvp.attention.op import attention
from tests.jvp.attention.closed_form import ROUNDING
from tests.jvp.foreign.models import MODELS, library, random_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"


def torchs(*given: Any) -> Any:
    """Derive by PyTorch alone."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(*given)


def derivative(run: Callable[..., Any], model: nn.Module, x: Tensor, v: Tensor) -> list[Tensor]:
    """Output, its tangent, and the gradients of all parameters past the tangent, in fp64."""
    u, du = run(model, x, v)
    loss = (u.double() - du.double().detach()).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return [u.detach().double(), du.detach().double(), torch.cat([g.flatten().double() for g in found])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("timm Swin", "timm ConvNeXt", "SD3", "Flux")
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_foreign_model_is_as_exact_as_torchs_derivative(name, compiled, dtype):
    """Errors against fp64 are at most twice those of `torch.func.jvp` in fp32, and the roundings of sums.

    PyTorch's tangents of norms are fp32, which the products of a network in bf16 refuse: there errors are at most eight
    times those of rounded weights and images in fp64.
    """
    model = random_model(name, 0).to(DEVICE)
    x, v = torch.randn(2, *MODELS[name].shape, dtype=torch.float64, device=DEVICE)
    by = lambda way: lambda model, x, v: way(lambda x: MODELS[name].call(model, x), (x,), (v,))[:2]  # noqa: E731
    exact = derivative(by(torchs), model, x, v)
    given = copy.deepcopy(model).to(dtype), x.to(dtype), v.to(dtype)
    run = torch.compile(by(jvp), fullgraph=True) if compiled else by(jvp)
    single = dtype == torch.float32
    torch._dynamo.reset()
    with exact_fp32(x.device):
        found = derivative(run, *given)
        rounded, x, v = given if single else (given[0].double(), given[1].double(), given[2].double())
        theirs = derivative(by(torchs), rounded, x, v)
    times, off = (2, 16) if single else (8, 2)
    for ours, other, right in zip(found, theirs, exact, strict=True):
        assert (ours - right).norm() <= times * (other - right).norm() + off * ROUNDING[dtype] * right.norm()
        assert right.abs().max() > 1e-6


def unet() -> tuple[nn.Module, Tensor]:
    """A U-Net of 32 x 32 images with attention at 16 x 16."""
    blocks: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = library("diffusers").UNet2DModel(sample_size=32, block_out_channels=(64, 128), layers_per_block=1, **blocks)
    return model, torch.randn(64, 3, 32, 32, device="cuda")


def vit() -> tuple[nn.Module, Tensor]:
    """A ViT of timm."""
    model = library("timm").create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    return model, torch.randn(8, 3, 64, 64, device="cuda")


def call(model: nn.Module, x: Tensor) -> Tensor:
    """Call the model and unwrap its output."""
    out = model(x, torch.full((len(x),), 3.0, device=x.device)) if hasattr(model, "time_embedding") else model(x)
    return out if isinstance(out, Tensor) else out.sample


def loss_of(model: nn.Module, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, du = jvp(lambda x: call(model, x), (x,), (v,))
    return (u - du).square().mean(), u, du


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("make", [unet, vit])
def test_compiled_a_foreign_model_agrees_with_eager_mode(make, prepared):
    torch.manual_seed(0)
    model, x = make()
    model = model.cuda().train()
    if prepared:
        prepare(model)
    v = torch.randn_like(x)
    parameters = list(model.parameters())
    found = []
    with exact_fp32(x.device):  # TF32 rounds more than the two may differ by
        for f in (loss_of, torch.compile(loss_of, fullgraph=True)):
            total, u, du = f(model, x, v)
            gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
            found.append([u.detach(), du, *gradients])
    scale = max(float(g.norm()) for g in found[0][2:])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert (a - b).norm() <= 1e-3 * (b.norm() if i < 2 else b.norm() + 1e-3 * scale)
    assert found[0][1].abs().max() > 1e-3


@pytest.mark.parametrize(
    "allow",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ],
)
def test_every_op_runs_after_tf32_was_allowed(allow):
    torch.manual_seed(0)
    q, tq = torch.randn(2, 1, 2, 128, 64, device="cuda")
    exact = jvp(lambda q: attention(q, q, q), (q.double(),), (tq.double(),))
    precise = jvp(lambda q: attention(q, q, q), (q,), (tq,))
    before = torch.backends.cuda.matmul.fp32_precision
    exec(allow)
    try:
        rounded = jvp(lambda q: attention(q, q, q), (q,), (tq,))
        assert jvp(layer_norm, (q,), (tq,))[1].isfinite().all()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    errors = [float((x[1] - exact[1]).norm() / exact[1].norm()) for x in (precise, rounded)]
    assert errors[0] < 1e-5 < 1e-4 < errors[1] < 1e-2  # TF32 was taken where it was allowed
