import pytest
import torch
from torch import Tensor, nn

from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.derivative import JVP_BACKENDS, velocity_and_derivative
from tests.jvp.networks import saved_bytes
from tests.meanflow.fields import GaussianField, batch_of_points

EXACT = ["func", "forward_ad", "two_pass"]


class Linear(nn.Module):
    """u = a z + b t + c r: its derivative along (v, 0, 1) is a v + b."""

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        return 3 * z + 5 * t[:, None, None, None] - 7 * r[:, None, None, None]


def random_unet(seed: int, **kwargs) -> UNet:
    """A small U-Net in fp64 in which no layer is zero, so that every path carries a tangent."""
    torch.manual_seed(seed)
    options = {"channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attention_resolutions": (6,)}
    net = UNet(3, 6, **options | kwargs).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    return net


def central_difference(model, z, r, t, v, label=None, h: float = 1e-4) -> Tensor:
    """The derivative along (v, 0, 1) to fourth order in h; for the fast time embedding, second is too coarse."""

    def slope(h: float) -> Tensor:
        return (model(z + h * v, r, t + h, label) - model(z - h * v, r, t - h, label)) / (2 * h)

    with torch.no_grad():
        return (4 * slope(h) - slope(2 * h)) / 3


@pytest.mark.parametrize("backend", JVP_BACKENDS)
def test_linear_field_has_the_known_derivative(backend, seed):
    z, v, t, r = batch_of_points(seed)
    u, dudt = velocity_and_derivative(Linear(), z, r, t, v, backend=backend)
    torch.testing.assert_close(u, Linear()(z, r, t))
    torch.testing.assert_close(dudt, 3 * v + 5)


@pytest.mark.parametrize("backend", EXACT)
def test_unet_matches_central_differences_in_double_precision(backend, seed):
    net = random_unet(seed, num_classes=4)
    z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
    label = torch.arange(7) % 4
    u, dudt = velocity_and_derivative(net, z, r, t, v, {"label": label}, backend=backend)
    expected = central_difference(net, z, r, t, v, label)
    torch.testing.assert_close(u, net(z, r, t, label), rtol=1e-10, atol=1e-10)
    error = (dudt - expected).norm() / expected.norm()
    assert expected.norm() > 1
    assert error < 1e-7


def test_finite_difference_agrees_with_the_exact_derivative(seed):
    net = random_unet(seed, time_max_frequency=4.0)
    z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
    _, exact = velocity_and_derivative(net, z, r, t, v)
    _, approximate = velocity_and_derivative(net, z, r, t, v, backend="finite_difference")
    error = (approximate - exact).norm() / exact.norm()
    assert 0 < error < 1e-2


@pytest.mark.parametrize("backend", JVP_BACKENDS)
def test_gradients_flow_through_the_prediction_alone(backend, seed):
    net = random_unet(seed)
    z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
    direct = torch.autograd.grad(net(z, r, t).square().sum(), list(net.parameters()))
    u, dudt = velocity_and_derivative(net, z, r, t, v, backend=backend)
    assert not dudt.requires_grad
    through = torch.autograd.grad(u.square().sum(), list(net.parameters()))
    for a, b in zip(through, direct, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", JVP_BACKENDS)
def test_every_pass_of_a_backend_drops_the_same_units(backend):
    """With dropout the prediction and its derivative belong to one network, the one of one mask."""
    net = random_unet(0, dropout=0.5).train()
    z, v, t, r = batch_of_points(0, shape=(3, 6, 6))
    torch.manual_seed(5)
    u, dudt = velocity_and_derivative(net, z, r, t, v, backend=backend)
    torch.manual_seed(5)
    expected_u = net(z, r, t)
    h = 1e-5
    torch.manual_seed(5)
    ahead = net(z + h * v, r, t + h)
    torch.manual_seed(5)
    behind = net(z - h * v, r, t - h)
    expected = (ahead - behind) / (2 * h)
    torch.testing.assert_close(u, expected_u, rtol=1e-9, atol=1e-9)
    assert (dudt - expected).norm() / expected.norm() < (0.5 if backend == "finite_difference" else 1e-6)


@pytest.mark.parametrize("name", ["unet", "dit"])
def test_nothing_of_the_tangent_is_kept(name):
    """A step with a derivative holds no more for its backward pass than a forward pass does."""
    net = random_unet(0) if name == "unet" else DiT(3, 6, width=16, depth=2, heads=2, qk_norm=True).double()
    z, v, t, r = batch_of_points(0, shape=(3, 6, 6))
    alone = saved_bytes(lambda: net(z, r, t))
    assert saved_bytes(lambda: velocity_and_derivative(net, z, r, t, v)[0]) <= 1.05 * alone
    # Recorded, the tangent keeps what it is made of, but for the layers that leave it out of the graph by themselves.
    assert saved_bytes(lambda: velocity_and_derivative(net, z, r, t, v, backend="forward_ad")) > 1.1 * alone


@pytest.mark.parametrize("backend", EXACT)
def test_the_exact_average_velocity_obeys_the_meanflow_identity(backend, seed):
    """u = v - (t - r) du/dt, equation 6 of the paper, on a field where u and v are known."""
    field = GaussianField()
    z, _, t, r = batch_of_points(seed)
    v = field.velocity(z, t)
    u, dudt = velocity_and_derivative(field, z, r, t, v, backend=backend)
    torch.testing.assert_close(u, v - (t - r)[:, None, None, None] * dudt, rtol=1e-9, atol=1e-9)


class Watched(nn.Module):
    """Keeps the sizes of the batches that a network was called with."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.sizes = net, []

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor) -> Tensor:
        self.sizes.append(len(z))
        return self.net(z, r, t, label)


@pytest.mark.parametrize("backend", JVP_BACKENDS)
@pytest.mark.parametrize(("chunk", "most"), [(3, 3), (50, 7)])
def test_chunks_change_nothing_but_how_much_is_differentiated_at_once(backend, chunk, most, seed):
    net, label = Watched(random_unet(seed, num_classes=4)), torch.arange(7) % 4
    z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
    whole = velocity_and_derivative(net, z, r, t, v, {"label": label}, backend=backend)
    net.sizes.clear()
    parts = velocity_and_derivative(net, z, r, t, v, {"label": label}, backend=backend, chunk=chunk)
    assert max(net.sizes) == most
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(u.square().sum(), list(net.parameters())) for u, _ in (parts, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)
    assert not parts[1].requires_grad


def test_a_derivative_taken_apart_has_a_format_of_its_own(seed):
    """The prediction keeps its own, and a difference that bf16 rounds away is one again."""
    net = random_unet(seed, time_max_frequency=4.0)
    z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
    exact = velocity_and_derivative(net, z, r, t, v)
    z, v, t, r = (a.float() for a in (z, v, t, r))
    net = net.float()

    def errors(backend: str, around: bool, precision: str | None) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            got = velocity_and_derivative(net, z, r, t, v, backend=backend, precision=precision)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]

    fine, rough = 1e-5, 1e-3
    for around, precision, limits in (
        (False, None, (fine, fine)),
        (True, None, (rough, rough)),
        (True, "fp32", (rough, fine)),
        (False, "bf16", (fine, rough)),
    ):
        for error, limit in zip(errors("two_pass", around, precision), limits, strict=True):
            assert (error < limit) if limit == fine else (limit < error < 0.1)
    assert errors("finite_difference", True, None)[1] > 0.1
    assert errors("finite_difference", True, "fp32")[1] < 0.02


def test_impossible_ways_are_refused():
    z, v, t, r = batch_of_points(0)
    with pytest.raises(ValueError, match="precision is 'bf16' for jvp_backend=func, expected one of two_pass, finite"):
        velocity_and_derivative(Linear(), z, r, t, v, precision="bf16")
    with pytest.raises(ValueError, match="chunk is -1"):
        velocity_and_derivative(Linear(), z, r, t, v, chunk=-1)


def test_a_model_without_tangent_is_refused_by_forward_ad():
    z, v, t, r = batch_of_points(0)
    with pytest.raises(ValueError, match="carries no tangent under forward_ad"):
        velocity_and_derivative(lambda z, r, t: z.detach(), z, r, t, v, backend="forward_ad")


def test_an_unknown_backend_is_refused_with_the_valid_names():
    z, v, t, r = batch_of_points(0)
    with pytest.raises(ValueError, match="jvp_backend is 'vjp', expected one of func, forward_ad"):
        velocity_and_derivative(Linear(), z, r, t, v, backend="vjp")
