"""The transformer of improved MeanFlow, compared with its formulas written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.meanflow.models.mit import MiT
from fullstride.meanflow.objective.derivative import velocity_and_derivative, velocity_and_some_derivatives
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import central_difference

CLASSES = 4
LABEL = torch.tensor([0, 3, CLASSES])
HEADS = 3


def random_mit(seed: int, **kwargs) -> MiT:
    torch.manual_seed(seed)
    options = {"width": 24, "depth": 3, "heads": HEADS, "head_blocks": 2, "num_classes": CLASSES}
    net = MiT(2, 4, **options | kwargs).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    return net


def inputs(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    z, v, t, r = batch_of_points(seed, batch=3, shape=(2, 4, 4))
    w, a, b = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (z, r, t, v), {"label": LABEL, "omega": 1 + 4 * w, "start": a / 2, "end": 0.5 + b / 2}


def by_hand(net: MiT, z, r, t, label, omega, start, end) -> Tensor:
    """u and v of each sample in turn, from the formulas and the weights alone."""
    w = dict(net.state_dict())

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def tokens(name, number):
        angle = number * 10_000.0 ** -(torch.arange(128, dtype=torch.float64) / 128)
        x = torch.cat([angle.cos(), angle.sin()])
        for layer in ("hidden", "out"):
            x = w[f"{name}.{layer}.weight"] @ x + w[f"{name}.{layer}.bias"]
            x = x * torch.sigmoid(x) if layer == "hidden" else x
        return w[f"{name}.tokens"] + x

    def turned(x):
        half = x.shape[1] // 2
        angle = torch.arange(len(x)).double()[:, None] * 10_000.0 ** -(torch.arange(half).double() / half)
        turn = torch.polar(torch.ones_like(angle), angle) * torch.complex(x[:, :half], x[:, half:])
        return torch.cat([turn.real, turn.imag], 1)

    def block(name, x):
        y, size = rms(x, w[f"{name}.norm"][0]), x.shape[1] // HEADS
        q, k, v = (y @ w[f"{name}.qkv.weight"].T).chunk(3, 1)
        mixed = []
        for i in range(HEADS):
            own = slice(i * size, (i + 1) * size)
            one, two = (turned(rms(a[:, own], w[f"{name}.qk_norm"][j])) for j, a in enumerate((q, k)))
            mixed.append(torch.softmax(one @ two.T / math.sqrt(size), 1) @ v[:, own])
        x = x + torch.cat(mixed, 1) @ w[f"{name}.out.weight"].T * w[f"{name}.gates"][0]
        y = rms(x, w[f"{name}.norm"][1])
        y = F.silu(y @ w[f"{name}.gated.weight"].T) * (y @ w[f"{name}.linear.weight"].T)
        return x + y @ w[f"{name}.down.weight"].T * w[f"{name}.gates"][1]

    found = []
    for i in range(len(z)):
        patches = [z[i, :, y : y + 2, x : x + 2].permute(1, 2, 0).flatten() for y in (0, 2) for x in (0, 2)]
        pixels = torch.stack(patches) @ w["patch_in.weight"].T + w["patch_in.bias"]
        named = w["label_tokens"] + w["label.weight"][label[i]]
        front = [named, tokens("scale", 1 - 1 / omega[i]), tokens("start", start[i]), tokens("end", end[i])]
        x = block("blocks.0", torch.cat([*front, tokens("gap", t[i] - r[i]), pixels]))
        outputs = []
        for head in ("u", "v"):
            y = block(f"{head}.blocks.1", block(f"{head}.blocks.0", x))[20:]
            y = rms(y, w[f"{head}.norm"]) @ w[f"{head}.patch_out.weight"].T + w[f"{head}.patch_out.bias"]
            image = torch.zeros(2, 4, 4, dtype=torch.float64)
            for n, patch in enumerate(y):
                row, column = 2 * (n // 2), 2 * (n % 2)
                image[:, row : row + 2, column : column + 2] = patch.unflatten(0, (2, 2, 2)).permute(2, 0, 1)
            outputs.append(image)
        found.append(torch.cat(outputs))
    return torch.stack(found)


def test_the_network_is_its_formulas(seed):
    net = random_mit(seed)
    (z, r, t, _), given = inputs(seed)
    with torch.no_grad():
        expected = by_hand(net, z, r, t, *given.values())
        torch.testing.assert_close(net(z, r, t, **given, both=True), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(net(z, r, t, **given), expected[:, :2], rtol=1e-9, atol=1e-9)
        plain = {"label": LABEL, "omega": torch.ones_like(t), "start": 0 * t, "end": torch.ones_like(t)}
        torch.testing.assert_close(net(z, r, t, LABEL), net(z, r, t, **plain))
        none = torch.full((3,), CLASSES)
        torch.testing.assert_close(net(z, r, t), net(z, r, t, none))


def test_the_derivative_is_that_of_central_differences(seed):
    net = random_mit(seed, num_classes=0)
    (z, r, t, v), _ = inputs(seed)
    expected = central_difference(lambda z, r, t, label: net(z, r, t), z, r, t, v, h=2e-5)
    _, dudt = velocity_and_derivative(net, z, r, t, v)
    assert expected.norm() > 0.1
    assert (dudt - expected).norm() / expected.norm() < 1e-7
    _, some = velocity_and_some_derivatives(net, z, r, t, v[:2])
    assert (some - expected[:2]).norm() / expected[:2].norm() < 1e-7


def test_it_starts_at_zero_as_blocks_that_do_nothing(seed):
    torch.manual_seed(seed)
    net = MiT(2, 4, width=24, depth=3, heads=3, head_blocks=2)
    (z, r, t, _), _ = inputs(seed)
    out = net(z.float(), r.float(), t.float(), both=True)
    assert not out.any()
    x = torch.randn(1, 5, 24)
    assert torch.equal(net.blocks[0](x), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 3}, "multiple of patch_size, 3"),
        ({"width": 21}, "multiple of twice the 3 heads"),
        ({"head_blocks": 4}, "head_blocks is 4, expected 1 to 3"),
    ],
)
def test_impossible_networks_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MiT(2, 4, **{"width": 24, "depth": 3, "heads": 3, "head_blocks": 2} | options)


def test_what_a_network_does_not_take_is_refused(seed):
    (z, r, t, _), given = inputs(seed)
    with pytest.raises(ValueError, match="unconditional network"):
        random_mit(seed, num_classes=0)(z, r, t, omega=given["omega"])
    with pytest.raises(ValueError, match="images are 2x4, expected 4x4"):
        random_mit(seed)(z[:, :, :2], r, t)
