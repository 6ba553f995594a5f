import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride import jvp as ops
from fullstride.jvp import partial_jvp
from fullstride.jvp.mixed_batch import RULES, MixedBatch
from fullstride.jvp.modules import Conv2d, Linear
from fullstride.jvp.norms import dispatch
from fullstride.jvp.norms import group_norm as triton_group_norm
from fullstride.jvp.norms.launch import launch
from fullstride.jvp.products import linear_map

B, N = 5, 2


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BESIDE = randn(B, 4, 6, 6, seed=7)  # holds all samples and does not move
ROW, CHANNEL = randn(6, seed=8), randn(4, 1, 1, seed=9)
KERNEL = randn(3, 4, 3, 3, seed=10)
MATRIX = randn(7, 6, seed=11)
# Of x and y, each (B, 4, 6, 6).
FUNCTIONS = {
    "sums": lambda x, y: (x + y) + (1.5 + x) + (y + BESIDE) + (BESIDE + x) + (x + ROW) + (CHANNEL + y),
    "differences": lambda x, y: (x - y) - (2 - x) - (y - BESIDE) - (BESIDE - x * x) - (x - ROW),
    "products": lambda x, y: x * y + 3 * x * BESIDE + (ROW * y) * x + BESIDE * y * 0.5 - x * x,
    "quotients": lambda x, y: x / 3 + y / BESIDE + (x * y) / ROW,
    "broadcasts": lambda x, y: x[:, :, :1] * y + x[:, :1] + ROW[:, None] * x[:, :, :1, :1] * y + BESIDE[:, :1],
    "expands": lambda x, y: x[:, :, :, :1] + BESIDE + torch.zeros_like(BESIDE) * 2,
    "waves": lambda x, y: x.sin() * torch.cos(y) - (-x).cos(),
    "activations": lambda x, y: F.silu(x) * F.gelu(y) + F.gelu(x, approximate="tanh"),
    "cat": lambda x, y: torch.cat([x, BESIDE, F.silu(y)], dim=1) * torch.cat((x, y, x), 1),
    "order": lambda x, _: (x.flatten(2).transpose(1, 2).unflatten(2, (2, -1))).permute(0, 2, 1, 3).contiguous().cos(),
    "parts": lambda x, y: (x * x).chunk(2, 1)[1] * y.chunk(2, dim=-3)[0] + y.transpose(0, 1).unbind()[3][:, None].sin(),
    "items": lambda x, y: x[:, None, 2:, ..., ::2].sin() + y[..., None].unsqueeze(1)[:, :, 1:3, :, :3, 0],
    "formats": lambda x, y: x.float().double() * y.to(torch.float32).to(torch.float64),
    "convolution": lambda x, y: F.conv2d(x * x, KERNEL, ROW[:3], 2, 1) + F.conv2d(y, KERNEL, padding=1, stride=2),
    "linear": lambda x, y: F.linear(x * x, MATRIX, MATRIX[:, 0]) + F.linear(y, MATRIX),
    "linear map": lambda x, y: linear_map(lambda a: a.cumsum(1), x * y),
    "dropout": lambda x, y: F.dropout(x, 0.4, training=False) * F.dropout(y, 0.0),
    "group_norm": lambda x, y: ops.group_norm(x * y, 2, CHANNEL.flatten(), CHANNEL.flatten(), act="silu"),
    "layer_norm": lambda x, y: ops.layer_norm(x * y, ROW, ROW + 1),
    "rms_norm": lambda x, y: ops.rms_norm(x, ROW) * ops.rms_norm(y),
    "ada_layer_norm": lambda x, y: ops.ada_layer_norm(x.flatten(1, 2), y[:, 0, :1], BESIDE[:, 1, :1]),
    "attention": lambda x, y: ops.attention(x, y, BESIDE) + ops.attention(BESIDE, x.sin(), y * x, is_causal=True),
    "masked": lambda x, y: ops.attention(x, y, x, attn_mask=BESIDE[:, :1] > 0),
}  # fmt: skip


def head(f):
    """Return f of the first samples alone, for an f that uses constant samples."""

    def called(x: Tensor, y: Tensor) -> Tensor:
        whole = [torch.cat([a, torch.zeros_like(a[:1]).expand(B - N, *a.shape[1:]) + 0.5]) for a in (x, y)]
        return f(*whole)[:N]

    return called


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_pass_gives_the_output_of_all_and_the_derivative_of_some(name, seed):
    f = FUNCTIONS[name]
    x, y = randn(B, 4, 6, 6, seed=seed), randn(B, 4, 6, 6, seed=seed + 1)
    moves = randn(N, 4, 6, 6, seed=seed + 2), randn(N, 4, 6, 6, seed=seed + 3)
    out, moved = partial_jvp(f, (x, y), moves)
    torch.testing.assert_close(out, f(x, y), rtol=0, atol=0)
    step = 1e-6
    ahead, behind = (head(f)(*(a[:N] + h * m for a, m in zip((x, y), moves, strict=True))) for h in (step, -step))
    limit = 1e-3 if name == "formats" else 1e-7
    reference = (
        torch.func.jvp(head(f), (x[:N], y[:N]), moves)[1] if name == "formats" else (ahead - behind) / (2 * step)
    )
    assert reference.norm() > 1
    assert (moved - reference).norm() < limit * reference.norm()
    assert moved.shape == out[:N].shape
    assert moved.dtype == out.dtype


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Dropout(0.5), Conv2d(8, 3, 1), nn.Flatten(2), Linear(16, 4)
    )


def test_the_graph_is_that_of_the_primals():
    net = network()
    x, v = torch.randn(5, 3, 4, 4), torch.randn(2, 3, 4, 4)
    gradients = []
    for run in (lambda: net(x), lambda: partial_jvp(net, (x,), (v,))[0]):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(run().square().sum(), list(net.parameters())))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert not partial_jvp(net, (x,), (v,))[1].requires_grad


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_a_sample_and_its_tangent_are_dropped_alike(p):
    x = torch.ones(3, 400)
    torch.manual_seed(0)
    out, moved = partial_jvp(lambda x: F.dropout(x, p), (x,), (2 * x[:2],))
    torch.manual_seed(0)
    assert torch.equal(out, F.dropout(x, p))
    assert torch.equal(moved, 2 * out[:2])


def test_images_keep_their_memory_order():
    net = nn.Sequential(Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Dropout(0.5), nn.GELU())
    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def f(x: Tensor) -> Tensor:
        h = net(x)
        h = torch.cat([h + h[:, :, :1, :1], (h * 2 - 1) * h], dim=1)
        return ops.group_norm(h, 2, act="silu", implementation="fused")

    x = torch.randn(5, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    for out in partial_jvp(f, (x,), (x[:3],)):
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert not out.is_contiguous()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter's
def test_one_kernel_takes_a_group_norm_of_all_and_the_tangents_of_some(monkeypatch, seed):
    x, v, w = (randn(*shape, seed=seed + i) for i, shape in enumerate([(5, 6, 4, 4), (2, 6, 4, 4), (6,)]))
    f = lambda x, w: ops.group_norm(x, 3, w, act="silu")  # noqa: E731

    def all_of(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        x, w = x.requires_grad_(), w.requires_grad_()
        out, moved = partial_jvp(lambda x: f(x, w), (x,), (v,))
        return [out, moved, *torch.autograd.grad(out.sin().sum(), (x, w))]

    right = all_of(x.clone(), v, w.clone())
    calls = []
    monkeypatch.setattr(dispatch, "chosen", lambda *_: "triton")
    monkeypatch.setattr(triton_group_norm, "launch", lambda *a, **k: calls.append(a[0]) or launch(*a, **k))
    found = all_of(x.float(), v.float(), w.float())
    assert len(calls) == 2  # forward, and backward of the primals alone
    for got, want in zip(found, right, strict=True):
        assert (got - want).norm() < 3e-6 * want.norm()


@pytest.mark.parametrize("training", [True, False])
def test_checkpointing_changes_nothing(training):
    net = network().train(training)
    x, v = torch.randn(5, 3, 4, 4), torch.randn(2, 3, 4, 4)
    results = []
    for f in (net, lambda x: ops.checkpoint(net, x)):
        torch.manual_seed(1)
        out, moved = partial_jvp(f, (x,), (v,))
        results.append([out, moved, *torch.autograd.grad(out.square().sum(), list(net.parameters()))])
    torch.testing.assert_close(*results)


REFUSED = {
    "digamma": (lambda x: torch.digamma(x), ValueError, "torch's digamma has no rule for a batch"),
    "norm": (nn.BatchNorm1d(3), ValueError, "torch's batch_norm has no rule for a batch"),
    "method": (lambda x: x.cummax(1), AttributeError, "cummax has no rule for a batch"),
    "samples chosen": (lambda x: x[0], ValueError, "chooses samples"),
    "one by one": (lambda x: x.unbind()[0], ValueError, "5 samples, of which 2 carry a tangent"),
    "samples in parts": (lambda x: x.chunk(2)[0], ValueError, "chunk along the samples"),
    "more samples": (lambda x: torch.cat([x, x]), ValueError, "cat along the samples"),
    "another dimension in front": (lambda x: x + torch.ones(2, 5, 3), ValueError, "a dimension in front"),
    "samples behind": (lambda x: F.silu(x.transpose(0, 1)), ValueError, "expected the samples in front"),
    "samples behind, chosen": (lambda x: x.transpose(0, 1)[:, 1:], ValueError, "chooses samples"),
    "samples behind, in parts": (lambda x: x.transpose(0, 1).chunk(2, 1)[0], ValueError, "chunk along the samples"),
    "more samples behind": (lambda x: torch.cat([x.transpose(0, 1)] * 2, -1), ValueError, "cat along the samples"),
    "samples behind, in one": (lambda x: x.transpose(0, 1).flatten(), ValueError, r"flatten puts \(3,\) in front"),
    "samples left behind": (lambda x: x.transpose(0, 1), ValueError, "expected the samples in front"),
    "nothing of it": (lambda x: torch.zeros(3), ValueError, "fn returned a Tensor, expected a batch with its tangent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_with_the_remedy(name):
    f, kind, message = REFUSED[name]
    with pytest.raises(kind, match=f"{message}.*use loss.split=static"):
        partial_jvp(f, (torch.randn(5, 3),), (torch.randn(2, 3),))


def test_samples_stay_in_front_of_what_they_are_cut_into():
    x, v = torch.randn(4, 3), torch.randn(2, 3)
    rows = lambda x: F.silu(x[:, None].flatten(0, 1).unflatten(0, (-1, 1)))[:, 0]  # noqa: E731
    torch.testing.assert_close(partial_jvp(rows, (x,), (v,)), (F.silu(x), torch.func.jvp(F.silu, (x[:2],), (v,))[1]))
    with pytest.raises(ValueError, match=r"unflatten puts \(2,\) in front of the samples"):
        partial_jvp(lambda x: x.unflatten(0, (2, -1)).transpose(0, 1), (x,), (v,))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "f", [lambda x: x + torch.ones(3, 1), lambda x: x * 2.0, lambda x: x - x, lambda x: x / 2, F.dropout]
)
def test_one_tangent_is_not_taken_for_all_samples(f, n):
    with pytest.raises(ValueError, match=rf"are \(3, 5\) and \(3, {n}\), expected the samples in front"):
        partial_jvp(lambda x: f(x.transpose(0, 1)).transpose(0, 1), (torch.randn(5, 3),), (torch.randn(n, 3),))


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x if isinstance(x, Tensor) else x.primal)
        return x.sin()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.saved_tensors[0].cos()


def without_a_graph(x):
    with torch.no_grad():
        return x * 2


def norm_without_a_graph(x):
    with torch.no_grad():
        return ops.layer_norm(x)


@pytest.mark.parametrize("f", [Sine.apply, without_a_graph, norm_without_a_graph])
def test_what_loses_a_gradient_is_refused(f):
    x = torch.randn(5, 3, requires_grad=True)
    with pytest.raises(ValueError, match="autograd.Function, or torch.no_grad, .* use loss.split=static"):
        partial_jvp(lambda x: f(3 * x).sum(1), (x,), (x[:2].detach(),))
    with torch.no_grad():
        out, moved = partial_jvp(lambda x: f(3 * x), (x,), (x[:2].detach(),))
    assert out.shape == (5, 3)
    assert moved.any()


def test_tangents_that_do_not_fit_are_refused():
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"tangents have \[\] samples, expected at least one"):
        partial_jvp(torch.sin, (x,), (None,))
    with pytest.raises(ValueError, match=r"tangents have \[2, 3\] samples"):
        partial_jvp(torch.add, (x, x), (x[:2], x[:3]))
    with pytest.raises(ValueError, match=r"a tangent is torch.float64 \(2, 3\)"):
        partial_jvp(torch.sin, (x,), (x[:2].double(),))


def test_a_batch_tells_what_a_tensor_tells():
    x = MixedBatch(torch.randn(5, 3), torch.randn(2, 3))
    assert (x.shape, x.ndim, x.dtype, x.device) == ((5, 3), 2, torch.float32, torch.device("cpu"))
    assert not hasattr(x, "grad_fn")
    assert "silu" in RULES


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8), lambda: nn.GroupNorm(2, 8)])
def test_a_prepared_norm_takes_the_tangents_of_some(norm, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), norm()).double()
    ops.prepare(model)
    x, v = randn(B, 8, seed=seed), randn(N, 8, seed=seed + 1)
    out, tangent = partial_jvp(model, (x,), (v,))
    expected, moved = ops.jvp(model, (x[:N],), (v,))
    torch.testing.assert_close(out[:N], expected)
    torch.testing.assert_close(tangent, moved)
    torch.testing.assert_close(out, model(x))
