"""Peak memory of a step with a derivative, compared with one without."""

import pytest
import torch
from torch import nn

from fullstride.jvp import jvp, prepare
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.unet import UNet
from tests.jvp.networks import peak_bytes


def encoder() -> nn.Module:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0), 6)
    prepare(net)
    return net


NETWORKS = {
    "encoder": (encoder, [(32, 16, 64)]),
    "unet": (
        lambda: UNet(3, 16, channels=32, channel_mult=(1, 2), num_blocks=2, attention_resolutions=()),
        [(6, 3, 16, 16), (6,), (6,)],
    ),
    "dit": (lambda: DiT(3, 16, width=64, depth=4, heads=4, patch_size=4), [(6, 3, 16, 16), (6,), (6,)]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_eager_derivative_holds_little_more_than_none(name):
    torch.manual_seed(0)
    make, shapes = NETWORKS[name]
    net, xs, ts = make(), *(tuple(torch.rand(s) for s in shapes) for _ in range(2))
    parameters = list(net.parameters())

    def gradient(derivative: bool) -> tuple:
        u, du = jvp(net, xs, ts) if derivative else (net(*xs), 0)
        return torch.autograd.grad((u - du).square().mean(), parameters)

    alone = peak_bytes(lambda: gradient(False))
    assert peak_bytes(lambda: gradient(True)) <= 1.15 * alone
    assert alone > 1e6


def test_a_saved_result_keeps_no_tangent():
    """A chain of functions that save what they return, with nothing else in between."""
    x, t = torch.randn(2, 100_000)
    x.requires_grad_()

    def chain(x):
        for _ in range(10):
            x = x.exp().tanh()
        return x

    alone = peak_bytes(lambda: torch.autograd.grad(chain(x).sum(), x))
    both = peak_bytes(lambda: torch.autograd.grad(jvp(chain, (x,), (t,))[0].sum(), x))
    assert alone > 20 * 400_000
    assert both <= alone + 10 * 400_000  # the twenty tangents, kept, would be 20 more
