import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp

from fullstride.meanflow.models.common import rms_norm
from fullstride.meanflow.models.dit import DiT, position_embedding
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import central_difference

CLASSES = 4
LABEL = torch.tensor([0, 3, CLASSES, 1, 2])


def random_dit(seed: int, channels: int = 3, size: int = 6, **kwargs: Any) -> DiT:
    """A small network in fp64 in which no layer is zero."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"patch_size": 2, "width": 24, "depth": 2, "heads": 3, "num_classes": CLASSES}
    net = DiT(channels, size, **options | kwargs).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    return net


def points(seed: int, net: DiT, channels: int = 3) -> tuple[Tensor, ...]:
    return batch_of_points(seed, batch=len(LABEL), shape=(channels, net.image_size, net.image_size))


# Widths, depths, heads: arXiv:2212.09748, table 1, and M of arXiv:2505.13447; the rounded counts: the latter's tables.
@pytest.mark.parametrize(
    ("patch", "width", "depth", "heads", "exactly", "millions"),
    [
        (4, 768, 12, 12, 131_165_248, 131),
        (2, 768, 12, 12, 131_091_472, 131),
        (2, 1024, 16, 16, 308_019_216, 308),
        (2, 1024, 24, 16, 459_137_040, 459),
        (2, 1152, 28, 16, 676_440_592, 676),
    ],
)
def test_the_published_sizes_have_the_published_number_of_weights(patch, width, depth, heads, exactly, millions):
    with torch.device("meta"):
        net = DiT(4, 32, patch_size=patch, width=width, depth=depth, heads=heads, num_classes=1000)
    count = sum(p.numel() for p in net.parameters())
    assert count == exactly
    assert round(count / 1e6) == millions


def by_hand(net: DiT, heads: int, z: Tensor, r: Tensor, t: Tensor, label: Tensor) -> Tensor:
    """The network of one sample after another, head after head, from the paper's formulas and the weights alone."""
    w = net.state_dict()
    p, (c, size, _) = net.patch_size, z.shape[1:]
    side, width = size // p, w["patch_in.bias"].numel()

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.einsum("oi,...i->...o", w[f"{name}.weight"], x) + w[f"{name}.bias"]

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def embed(name: str, time: float) -> Tensor:
        angles = [time / 10_000 ** (i / 128) for i in range(128)]
        features = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        hidden = silu(linear(f"conditioning.{name}.hidden", torch.tensor(features, dtype=torch.float64)))
        return linear(f"conditioning.{name}.out", hidden)

    def place(row: int, column: int) -> Tensor:
        angles = [[k / 10_000 ** (4 * i / width) for i in range(width // 4)] for k in (column, row)]
        return torch.tensor([f(a) for half in angles for f in (math.sin, math.cos) for a in half], dtype=torch.float64)

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def attend(name: str, x: Tensor) -> Tensor:
        projected, mixed, d = linear(f"{name}.qkv", x), [], width // heads
        for first in range(0, width, d):
            q, k, v = (projected[:, part * width + first :][:, :d] for part in range(3))
            if f"{name}.qk_weight" in w:
                q, k = rms(q, w[f"{name}.qk_weight"][0]), rms(k, w[f"{name}.qk_weight"][1])
            scores = torch.einsum("id,jd->ij", q, k) / math.sqrt(d)
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            mixed.append(torch.einsum("ij,jd->id", weights, v))
        return linear(f"{name}.out", torch.cat(mixed, 1))

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    out = torch.zeros_like(z)
    for b in range(len(z)):
        grid = [(i, j) for i in range(side) for j in range(side)]
        tokens = torch.stack(
            [z[b, :, i * p : i * p + p, j * p : j * p + p].permute(1, 2, 0).reshape(-1) for i, j in grid]
        )
        x = linear("patch_in", tokens) + torch.stack([place(i, j) for i, j in grid]).float()
        condition = embed("time", t[b].item()) + embed("gap", (t[b] - r[b]).item())
        condition = silu(condition + w["conditioning.label.weight"][label[b]])
        for n in range(len(net.blocks)):
            m = linear(f"blocks.{n}.modulation.linear", condition).view(6, width)
            x = x + m[2] * attend(f"blocks.{n}.attention", norm(x) * (1 + m[1]) + m[0])
            hidden = gelu(linear(f"blocks.{n}.mlp.0", norm(x) * (1 + m[4]) + m[3]))
            x = x + m[5] * linear(f"blocks.{n}.mlp.2", hidden)
        shift, scale = linear("modulation_out.linear", condition).view(2, width)
        for (i, j), patch in zip(grid, linear("patch_out", norm(x) * (1 + scale) + shift), strict=True):
            out[b, :, i * p : i * p + p, j * p : j * p + p] = patch.view(p, p, c).permute(2, 0, 1)
    return out


@pytest.mark.parametrize(
    ("channels", "size", "options"),
    [(3, 6, {}), (1, 9, {"patch_size": 3, "qk_norm": True, "mlp_ratio": 2.5}), (4, 8, {"width": 16, "heads": 2})],
)
def test_the_network_is_the_papers_formulas(channels, size, options, seed):
    net = random_dit(seed, channels, size, **options)
    z, _, t, r = points(seed, net, channels)
    expected = by_hand(net, options.get("heads", 3), z, r, t, LABEL)
    assert expected.std() > 0.1
    # The positions are kept in fp32.
    torch.testing.assert_close(net(z, r, t, LABEL), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_derivative_is_that_of_central_differences(qk_norm, seed):
    net = random_dit(seed, qk_norm=qk_norm)
    z, v, t, r = points(seed, net)
    tangents = (v, torch.zeros_like(r), torch.ones_like(t))
    u, dudt = jvp(lambda z, r, t: net(z, r, t, LABEL), (z, r, t), tangents)[:2]
    expected = central_difference(net, z, r, t, v, LABEL)
    torch.testing.assert_close(u, net(z, r, t, LABEL), rtol=1e-9, atol=1e-9)
    assert expected.norm() > 1
    assert (dudt - expected).norm() / expected.norm() < 1e-7


def test_it_starts_at_zero_with_a_gradient_for_the_last_layer(seed):
    torch.manual_seed(seed)
    net = DiT(1, 8, width=16, depth=2, heads=2)
    out = net(torch.randn(3, 1, 8, 8), torch.zeros(3), torch.ones(3))
    assert out.abs().max() == 0
    (out - 1).square().sum().backward()
    assert net.patch_out.weight.grad is not None
    assert net.patch_out.weight.grad.norm() > 0


def test_it_starts_as_published():
    torch.manual_seed(0)
    net = DiT(4, 8, width=192, depth=1, heads=3, num_classes=50)
    zero = {name for name, p in net.named_parameters() if p.abs().max() == 0}
    gates = ("blocks.0.modulation.linear", "modulation_out.linear", "patch_out")
    assert zero == {n for n, _ in net.named_parameters() if n.endswith("bias")} | {f"{gate}.weight" for gate in gates}
    for name, p in net.named_parameters():
        if name.startswith("conditioning.") and name not in zero:
            assert p.std().item() == pytest.approx(0.02, rel=0.05)
        elif name not in zero:  # Glorot: uniform up to sqrt(6 / (in + out))
            assert p.abs().max().item() == pytest.approx(math.sqrt(6 / sum(p.shape)), rel=0.01)


def test_the_output_depends_on_every_input(seed):
    net = random_dit(seed)
    z, _, t, r = points(seed, net)
    out = net(z, r, t, LABEL)
    others = [net(z + 0.1, r, t, LABEL), net(z, r + 0.1, t, LABEL), net(z, r, t + 0.1, LABEL)]
    others += [net(z, r, t, (LABEL + 1) % (CLASSES + 1)), net(z, r + 0.1, t + 0.1, LABEL)]
    assert all((o - out).abs().amax((1, 2, 3)).min() > 1e-6 for o in others)


def test_no_label_is_the_label_of_no_class(seed):
    net = random_dit(seed)
    z, _, t, r = points(seed, net)
    assert torch.equal(net(z, r, t), net(z, r, t, torch.full_like(LABEL, CLASSES)))


def test_a_sample_does_not_see_its_batch(seed):
    net = random_dit(seed)
    z, _, t, r = points(seed, net)
    torch.testing.assert_close(net(z, r, t, LABEL)[2:3], net(z[2:3], r[2:3], t[2:3], LABEL[2:3]), rtol=1e-9, atol=1e-9)


def swapped(z: Tensor) -> Tensor:
    """z with its first and its last patch of 2 x 2 exchanged."""
    out = z.clone()
    out[..., :2, :2], out[..., -2:, -2:] = z[..., -2:, -2:], z[..., :2, :2]
    return out


def test_only_the_position_embedding_tells_patches_apart(seed):
    net = random_dit(seed)
    z, _, t, r = points(seed, net)
    assert (net(swapped(z), r, t) - swapped(net(z, r, t))).abs().max() > 1e-3
    net.position.zero_()
    torch.testing.assert_close(net(swapped(z), r, t), swapped(net(z, r, t)), rtol=1e-9, atol=1e-9)


def test_every_place_has_a_position_of_its_own():
    position = position_embedding(5, 16)
    distance = torch.cdist(position, position) + torch.eye(25) * 9
    assert distance.min() > 0.01
    torch.testing.assert_close(position.square().sum(1), torch.full((25,), 8.0, dtype=torch.float64))


def test_qk_norm_bounds_the_logits():
    x = torch.randn(3, 7, 8) * 1e4
    torch.testing.assert_close(rms_norm(x, torch.ones(8)).norm(dim=-1), torch.full((3, 7), math.sqrt(8)))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_times_and_norms_stay_in_fp32_under_autocast(qk_norm, seed):
    net = random_dit(seed, qk_norm=qk_norm, width=32, heads=2).float()
    z, v, t, r = (a.float() for a in points(seed, net))
    exact = net(z, r, t, LABEL)
    kept = net.conditioning(r, t, LABEL)
    tangents = (v, torch.zeros_like(r), torch.ones_like(t))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(net.conditioning(r, t, LABEL), kept)
        out = net(z, r, t, LABEL)
        dudt = jvp(lambda z, r, t: net(z, r, t, LABEL), (z, r, t), tangents)[1]
    assert kept.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert bool(dudt.isfinite().all())
    assert 1e-4 < (out.float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (9, {}, "image_size is 9, expected a multiple of patch_size, 2; choose another patch_size or resize"),
        (8, {"width": 18, "heads": 3}, "width is 18, expected a multiple of 4 and of the 3 heads"),
        (8, {"width": 20, "heads": 3}, "width is 20, expected a multiple of 4 and of the 3 heads"),
    ],
)
def test_impossible_networks_are_refused(size, options, message):
    with pytest.raises(ValueError, match=message):
        DiT(1, size, **options)


@pytest.mark.parametrize("shape", [(8, 6), (10, 10)])
def test_images_of_another_shape_are_refused(shape):
    net = DiT(1, 8, width=8, depth=1, heads=1)
    with pytest.raises(ValueError, match=f"images are {shape[0]}x{shape[1]}, expected 8x8; .* pad or crop"):
        net(torch.zeros(1, 1, *shape), torch.zeros(1), torch.ones(1))


def test_a_label_for_an_unconditional_network_is_refused():
    net = DiT(1, 8, width=8, depth=1, heads=1)
    with pytest.raises(ValueError, match="a label was given to an unconditional network"):
        net(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.long))
