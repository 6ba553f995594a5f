"""Unprepared functions and models: `jvp` itself sends their attention and norms to the right ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp as torch_jvp
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fullstride.jvp import jvp, prepare
from fullstride.jvp.checking.finite_difference import differences
from tests.jvp import plain_ops
from tests.jvp.derivatives import close

ACCURACY: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9}  # of differences
BIAS, SCALE = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(0.3, 2, 6, dtype=torch.float64)
MEAN, VAR = BIAS.sin(), SCALE.square()


def square(x: Tensor) -> Tensor:
    """Return a matrix far from singular."""
    return x.mT @ x / 4 + torch.eye(x.shape[-1], dtype=x.dtype) * 2


def normalized(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
    return F.layer_norm(out, (6,), SCALE, BIAS)


class Hooked(nn.Module):
    """A norm in a hook."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.line.register_forward_hook(normalized)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class Held(nn.Module):
    """Norms in a dictionary that no module knows of, and a subclass with a forward of its own."""

    class Own(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return F.layer_norm(input + 1, self.normalized_shape, self.weight, self.bias, self.eps).sin()

    def __init__(self):
        super().__init__()
        self.held = {"rows": nn.LayerNorm(6).double(), "batch": nn.BatchNorm1d(6, track_running_stats=False).double()}
        self.own = self.Own(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.held["batch"](self.held["rows"](x)))


ROWS, IMAGES = (5, 6), (4, 6, 3, 2)
FUNCTIONS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], tuple[int, ...]]] = {
    "F.layer_norm": (lambda: lambda x: F.layer_norm(x, (6,), SCALE, BIAS), ROWS),
    "torch.layer_norm": (lambda: lambda x: torch.layer_norm(x, (6,), SCALE, BIAS, 1e-3, False), ROWS),
    "torch.layer_norm of planes": (lambda: lambda x: torch.layer_norm(x, (3, 2)), IMAGES),
    "torch.rms_norm": (lambda: lambda x: torch.rms_norm(x, (6,), SCALE), ROWS),
    "torch.group_norm": (lambda: lambda x: torch.group_norm(x, 2, SCALE, BIAS), IMAGES),
    "F.batch_norm": (lambda: lambda x: F.batch_norm(x, None, None, SCALE, BIAS, training=True), IMAGES),
    "F.batch_norm of rows": (lambda: lambda x: F.batch_norm(x, MEAN.clone(), VAR.clone(), training=True), ROWS),
    "F.batch_norm by running": (lambda: lambda x: F.batch_norm(x.sin(), MEAN, VAR, None, BIAS), IMAGES),
    "torch.batch_norm": (lambda: lambda x: torch.batch_norm(x, SCALE, BIAS, None, None, True, 0.1, 1e-5, False), ROWS),
    "F.instance_norm": (lambda: lambda x: F.instance_norm(x, weight=SCALE, bias=BIAS), IMAGES),
    "F.instance_norm by running": (
        lambda: lambda x: F.instance_norm(x.sin(), MEAN, VAR, SCALE, use_input_stats=False),
        IMAGES,
    ),
    "BatchNorm2d without parameters": (lambda: nn.BatchNorm2d(6, affine=False), IMAGES),
    "InstanceNorm2d without a batch": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES[:1] + IMAGES[2:]),
    "InstanceNorm1d that counts": (lambda: nn.InstanceNorm1d(6, track_running_stats=True), (4, 6, 5)),
    "SyncBatchNorm by running": (lambda: nn.Sequential(nn.SyncBatchNorm(6), nn.Tanh()).eval(), IMAGES),
    "a hook": (Hooked, ROWS),
    "a dictionary": (Held, ROWS),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), IMAGES),
    "glu": (lambda: lambda x: F.glu(torch.cat([x, x.sin()], -1)), ROWS),
    "hardsigmoid": (lambda: lambda x: F.hardsigmoid(x * x) + F.hardsigmoid(x * 1, inplace=True), ROWS),
    "cholesky_inverse": (lambda: lambda x: x @ torch.cholesky_inverse(square(x)), ROWS),
    "cholesky_inverse of an upper one": (lambda: lambda x: x @ square(x).cholesky_inverse(upper=True), ROWS),
    "triangular_solve": (lambda: lambda x: torch.triangular_solve(x.mT, square(x), True, True, True)[0].mT, ROWS),
    "a written copy": (lambda: lambda x: (x * x).frac().mul_(x).square_() + torch.t_copy(x).mul_(2).t() * x, ROWS),
    "vmap": (lambda: vmap(lambda x: F.layer_norm(x, (6,), SCALE, BIAS)), ROWS),
    "torch.func.grad": (lambda: torch.func.grad(lambda x: F.layer_norm(x, (6,), SCALE, BIAS).sin().sum()), ROWS),
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated:UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("prepared", [False, True])
def test_gradients_through_the_tangent_are_those_of_its_values(name, prepared, seed):
    torch.manual_seed(seed)
    make, shape = FUNCTIONS[name]
    f: Any = make()
    if isinstance(f, nn.Module):
        f = f.double()
        for p in f.parameters():
            p.data = torch.randn_like(p)
        if prepared:
            prepare(f)
    elif prepared:
        pytest.skip("not a module")
    x, v, w, *moves = torch.randn(5, *shape, dtype=torch.float64)

    def slope(x: Tensor, v: Tensor) -> Tensor:
        out, tangent = jvp(f, (x,), (v,), tangent_grad=True)
        return ((out + tangent.sin()) * w).sum()

    (expected,), _ = differences(lambda *x: [slope(*x).detach()], [x, v], moves)
    found = torch.autograd.grad(slope(x.requires_grad_(), v.requires_grad_()), (x, v))
    assert_close(sum((g * m).sum() for g, m in zip(found, moves, strict=True)), expected, **ACCURACY)
    assert expected.abs() > 1e-3
    by_default = jvp(f, (x.detach(),), (v.detach(),))
    (tangent,), _ = differences(lambda x: [f(x).detach()], [x.detach()], [v.detach()])
    assert_close(by_default[1], tangent, **ACCURACY)
    assert tangent.abs().max() > 0.1


def test_running_statistics_are_counted_once(seed):
    torch.manual_seed(seed)
    x, v = torch.randn(2, 4, 6, 3, dtype=torch.float64)
    for kind in (nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, track_running_stats=True)):
        counted, expected = kind(6).double(), kind(6).double()
        expected(x)
        jvp(counted, (x,), (v,))
        close(counted.running_mean, expected.running_mean)
        close(counted.running_var, expected.running_var)


@pytest.mark.parametrize("name", ["solve", "det", "cholesky", "native_layer_norm"])
def test_what_torch_has_a_wrong_gradient_of_is_refused(name, seed):
    torch.manual_seed(seed)
    x, v = torch.randn(2, 4, 4, dtype=torch.float64)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "solve": lambda x: torch.linalg.solve(x, v),
        "det": lambda x: (x @ x.mT).det(),
        "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
        "native_layer_norm": lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5)[0],
    }
    with pytest.raises(ValueError, match=rf"gradient through the tangent of \w*{name} is wrong"):
        jvp(calls[name], (x,), (v,), tangent_grad=True)
    close(jvp(calls[name], (x,), (v,)), tuple(torch_jvp(calls[name], (x,), (v,))))


class Registered(nn.Module):
    """Attention that is found in a registry, as in transformers, by a method that is not forward."""

    registry: dict[str, Callable] = {"sdpa": F.scaled_dot_product_attention}  # noqa: RUF012

    def encode(self, x: Tensor) -> Tensor:
        return self.registry["sdpa"](x, x, x.sin(), is_causal=True)


@pytest.mark.parametrize("tangent_grad", [False, True])
def test_attention_is_found_wherever_it_is_called_from(tangent_grad, seed):
    torch.manual_seed(seed)
    x, v = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64)
    expected = torch_jvp(lambda x: plain_ops.attention(x, x, x.sin(), is_causal=True), (x,), (v,))
    close(tuple(jvp(Registered().encode, (x,), (v,), tangent_grad=tangent_grad)), tuple(expected))
    mapped = lambda x: vmap(Registered().encode)(x)  # noqa: E731
    close(tuple(jvp(mapped, (x,), (v,), tangent_grad=tangent_grad)), tuple(expected))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "MLP": lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 1, 1)),
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)),
    "rms norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6)),
    "group norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.GELU()),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)),
    "attention": lambda: nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (1, 3, 4)), Registered_()),
}


class Registered_(Registered):  # noqa: N801
    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("tangent_grad", [False, True])
def test_a_gradient_inside_has_its_derivative(name, prepared, tangent_grad, seed):
    torch.manual_seed(seed)
    net = LAYERS[name]().double()
    x, v = torch.randn(2, 5, 6, dtype=torch.float64)
    weight = next(net.parameters())

    def inner(x: Tensor) -> Tensor:
        return torch.autograd.grad(net(x).sin().square().sum(), weight, create_graph=True)[0]

    def values(x: Tensor) -> list[Tensor]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return [inner(x).detach()]

    (expected,), _ = differences(values, [x], [v])
    if prepared:
        prepare(net)
    found = jvp(inner, (x,), (v,), tangent_grad=tangent_grad)
    close(found[0].detach(), values(x)[0])
    assert_close(found[1].detach(), expected, **ACCURACY)
    assert expected.abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("tangent_grad", [False, True])
def test_what_has_no_derivative_is_named(tangent_grad):
    x, lstm = torch.randn(2, 5, 8), nn.LSTM(8, 8, batch_first=True)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with pytest.raises(RuntimeError, match=r"use fullstride.jvp.checkpoint\(module, \*args\)"):
        jvp(lambda x: checkpoint(net, x, use_reentrant=False), (x,), (x,), tangent_grad=tangent_grad)
    try:  # where oneDNN is there and takes these sizes
        jvp(lambda x: lstm(x)[0], (x,), (x,), tangent_grad=tangent_grad)
    except RuntimeError as error:
        assert "torch.backends.mkldnn.flags(enabled=False)" in str(error)  # noqa: PT017
    with torch.backends.mkldnn.flags(enabled=False):
        assert jvp(lambda x: lstm(x)[0], (x,), (x,), tangent_grad=tangent_grad)[1].abs().max() > 1e-3


def test_a_backward_hook_is_named():
    net, x = nn.Linear(8, 8), torch.randn(2, 8)
    net.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="A module's full backward hook is such a function"):
        jvp(net, (x,), (x,))


class Named(TorchFunctionMode):
    """Mode that notes the functions called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tangent_grad", [False, True])
def test_a_mode_of_the_users_sees_what_ops_are_made_of(tangent_grad):
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    prepare(model)
    x, t = torch.randn(2, 3, 6)
    mode = Named()

    def inside(x):
        with mode:
            return model(x)

    alone = jvp(model, (x,), (t,), tangent_grad=tangent_grad)
    seen = jvp(inside, (x,), (t,), tangent_grad=tangent_grad)
    assert {"linear", "_make_dual"} <= mode.names  # what the package's own modes need not see
    assert all(torch.equal(a, b) for a, b in zip(alone, seen, strict=True))
