"""`jvp` and `prepare` on models of other libraries, on a GPU: `python -m pytest tests/gpu/test_jvp_models.py`."""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullstride.jvp import attention_dual, jvp, prepare
from fullstride.jvp.attention import naive
from fullstride.jvp.attention import torch_sdpa as library
from fullstride.jvp.attention.torch_sdpa import whole_tiles
from fullstride.jvp.implementation import only_plain
from fullstride.jvp.norms import naive as naive_norms
from tests.jvp.attention.math_form import draw, expected_backward, transposed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU or later"
)


class Images(nn.Module):
    """Convolutions and group norms, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(16, 64)
        self.second, self.last = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.second(F.silu(self.norm(h))))


def encoder(layers: int = 2, width: int = 256) -> nn.Module:
    """PyTorch's own transformer; smooth, as a unit that is turned on by a rounding would change the derivative."""
    layer = nn.TransformerEncoderLayer(width, 4, batch_first=True, dropout=0.0, activation="gelu")
    return nn.TransformerEncoder(layer, layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (encoder, (3, 77, 256)),
    "long_encoder": (encoder, (2, 640, 256)),
    "images": (Images, (2, 3, 17, 16)),
}
WAYS: dict[str, Callable] = {
    "eager": jvp,
    "func": torch.func.jvp,
    "aot_eager": torch.compile(jvp, fullgraph=True, backend="aot_eager"),
    "inductor": torch.compile(jvp, fullgraph=True),
}


def results(way: Callable, model: nn.Module, x: Tensor, v: Tensor) -> list[Tensor]:
    """u, du/dt, and the gradients of MeanFlow's loss."""
    u, du = way(model, (x,), (v,))
    return [u, du, *torch.autograd.grad((u - du.detach()).square().mean(), list(model.parameters()))]


def error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative errors: of the value, of the tangent, and of all gradients together."""
    flat = [[torch.cat([y.flatten() for y in part]) for part in (x[:1], x[1:2], x[2:])] for x in (found, exact)]
    return [((a - b).norm() / b.norm()).item() for a, b in zip(*flat, strict=True)]


@contextlib.contextmanager
def no_plain_forms():
    """Make `naive` raise, so that only kernels run."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in (
            (naive, ("forward", "backward")),
            (naive_norms, ("row_norm", "row_norm_backward", "group_norm", "group_norm_backward")),
        ):
            for name in names:
                patch.setattr(module, name, lambda *_, **__: pytest.fail("a plain form ran"))
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_model_is_no_less_exact_than_eager(name, dtype, way, seed):
    torch.manual_seed(seed)
    torch._dynamo.reset()
    make, shape = MODELS[name]
    model = make().to(CUDA)
    x, v = torch.randn(2, *shape, device=CUDA)
    model, x, v = model.to(dtype), x.to(dtype), v.to(dtype)
    with sdpa_kernel(SDPBackend.MATH):
        expected = results(torch.func.jvp, copy.deepcopy(model).double(), x.double(), v.double())
    prepare(model)
    with only_plain():  # torch's own derivative of a norm in bf16 is of another format than its value, and fails
        plain = results(jvp, model, x, v)
    with no_plain_forms():
        found = results(WAYS[way], model, x, v)
    floor = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(error(found, expected), error(plain, expected), strict=True):
        assert ours <= max(2 * theirs, floor)


# The leaves were made on another stream than the one that is captured.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_follows_its_inputs(name, seed):
    torch.manual_seed(seed)
    make, shape = MODELS[name]
    model = make().to(CUDA)
    prepare(model)
    x, v = torch.randn(2, *shape, device=CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            results(jvp, model, x, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = results(jvp, model, x, v)
    x.copy_(torch.randn_like(x))
    v.copy_(torch.randn_like(v))
    for y in found:
        y.fill_(torch.nan)
    graph.replay()
    for a, b in zip(found, results(jvp, model, x, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def peak(call: Callable[[], Any]) -> int:
    """Return the peak of three calls above the memory before: memory freed during a call hides as much of its peak."""
    call()
    return max(added(call) for _ in range(3))


def added(call: Callable[[], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_tangent_keeps_no_activations():
    model = encoder(8, 512).to(CUDA)
    prepare(model)
    x, v = torch.randn(2, 8, 512, 512, device=CUDA)
    parameters = list(model.parameters())
    alone = peak(lambda: torch.autograd.grad(model(x).square().mean(), parameters))
    assert peak(lambda: results(jvp, model, x, v)) <= 1.15 * alone


@pytest.mark.parametrize("length", [4096, 32768])
def test_memory_is_linear_in_the_length(length):
    """Memory is that of the twelve tensors and their gradients, and a few numbers per row."""
    q = torch.randn(1, 4, length, 64, device=CUDA, dtype=torch.bfloat16)
    inputs = [torch.randn_like(q).requires_grad_() for _ in range(6)]
    tensors = 8 * q.numel() * q.itemsize  # o, to, and six gradients

    def step() -> None:
        outputs: Any = attention_dual(inputs[0], inputs[1], inputs[2], *inputs[3:])
        torch.autograd.grad(outputs, inputs, (q, q))

    assert peak(step) <= 1.2 * tensors


@hopper
@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 8, 8, 525, 531, 64), {}),
        ((2, 8, 2, 512, 640, 128), {}),
        ((1, 4, 4, 768, 640, 64), {"causal": True}),
        ((1, 4, 4, 640, 640, 128), {"causal": True, "layout": transposed}),
        ((1, 4, 4, 512, 512, 80, 64), {}),
        ((1, 4, 2, 512, 512, 72), {"layout": transposed}),
    ],
    ids=["half_empty_tiles", "grouped", "causal_cross", "causal_transposed", "narrow_values", "72"],
)
def test_past_the_tangent_the_librarys_backward_is_taken(sizes, options, dtype, cudnn, seed, monkeypatch):
    taken, ours = [], library.backward_of
    monkeypatch.setattr(library, "backward_of", lambda *a, **k: taken.append(ours(*a, **k)) or taken[-1])
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: cudnn)
    given: Any = sizes
    case = draw(seed, *given, **options).to(CUDA, dtype)
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in case.inputs[:3]]
    dual: Any = functools.partial(attention_dual, is_causal=case.causal, scale=case.scale, enable_gqa=True)
    o, _ = dual(*leaves, *case.inputs[3:], tangent_grad=False)
    go = torch.randn_like(o)
    expected: Any = expected_backward(case.to(torch.float64), go.double(), None)[:3]
    found = torch.autograd.grad(o, leaves, go)
    assert (taken[0] is not None) == (cudnn and whole_tiles(*sizes[3:5]))
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() <= 2 * torch.finfo(dtype).eps * y.norm()


def test_deterministic_mode_does_without_the_library(seed):
    case = draw(seed, 1, 4, 4, 1152, 1152, 64).to(CUDA, torch.bfloat16)
    leaves = [x.requires_grad_() for x in case.inputs[:3]]
    dual: Any = functools.partial(attention_dual, tangent_grad=False)
    o, _ = dual(*leaves, *case.inputs[3:])
    go = torch.randn_like(o)
    torch.use_deterministic_algorithms(True)
    try:
        one, two = (torch.autograd.grad(o, leaves, go, retain_graph=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
