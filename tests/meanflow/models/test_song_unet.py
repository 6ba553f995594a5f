import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullstride.meanflow.models.common import GroupNorm
from fullstride.meanflow.models.resample import Double, Halve
from fullstride.meanflow.models.song_unet import Attention, Block, Mapping, SongUNet, sinusoids
from fullstride.meanflow.objective.derivative import velocity_and_derivative
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import EXACT


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def parts(net: nn.Module, kind: type) -> list:
    return [m for m in net.modules() if isinstance(m, kind)]


def small(seed: int, **options) -> SongUNet:
    """A small network in fp64 in which no layer is near zero."""
    torch.manual_seed(seed)
    sizes = {"channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attention_resolutions": (3,), "dropout": 0.0}
    net = SongUNet(3, 6, **sizes | options).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    return net


def test_the_cifar10_network_has_the_published_size():
    """55.9M (arXiv:2505.13447); 55,932,419 in Gsunshine/py-meanflow's own, which has six augmentation labels."""
    with torch.device("meta"):
        assert count(SongUNet(3, 32, augment_dim=6)) == 55_932_419
        assert count(SongUNet(3, 32)) == 55_932_419 - 6 * 512


def test_sinusoids_are_those_of_the_transformer_positions(seed):
    time = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = sinusoids(time, 8)
    for i in range(4):
        frequency = 10_000 ** (-i / 3)
        torch.testing.assert_close(got[:, i], (time * frequency).sin())
        torch.testing.assert_close(got[:, 4 + i], (time * frequency).cos())


def test_halving_is_a_smooth_mean_and_doubling_its_transpose(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 6, 10, generator=g, dtype=torch.float64)
    taps = torch.tensor([1.0, 3, 3, 1], dtype=torch.float64) / 8
    padded = F.pad(x, (1, 1, 1, 1))
    expected = torch.einsum("bchwij,i,j->bchw", padded.unfold(2, 4, 2).unfold(3, 4, 2), taps, taps)
    halve, double = Halve().double(), Double().double()
    torch.testing.assert_close(halve(x), expected)
    y = torch.randn(2, 3, 3, 5, generator=g, dtype=torch.float64)
    torch.testing.assert_close((halve(x) * y).sum() * 4, (x * double(y)).sum())
    torch.testing.assert_close(Double()(torch.ones(1, 1, 5, 5))[:, :, 2:-2, 2:-2], torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize("backend", EXACT)
def test_the_derivative_matches_central_differences(backend, seed):
    net = small(seed, augment_dim=4, num_classes=3)
    z, v, t, r = batch_of_points(seed, shape=(3, 6, 6))
    given = {"label": torch.arange(7) % 4, "augment": torch.randn(7, 4, dtype=torch.float64)}
    u, dudt = velocity_and_derivative(net, z, r, t, v, given, backend=backend)

    def slope(h: float) -> torch.Tensor:
        return (net(z + h * v, r, t + h, **given) - net(z - h * v, r, t - h, **given)) / (2 * h)

    with torch.no_grad():
        expected = (4 * slope(1e-3) - slope(2e-3)) / 3
        torch.testing.assert_close(u, net(z, r, t, **given), rtol=1e-9, atol=1e-9)
    assert expected.norm() > 1
    assert (dudt - expected).norm() / expected.norm() < 1e-7


def test_everything_that_conditions_the_network_reaches_its_output(seed):
    net = small(seed, augment_dim=4, num_classes=3)
    z, _, t, r = batch_of_points(seed, shape=(3, 6, 6))
    label, augment = torch.zeros(7, dtype=torch.long), torch.ones(7, 4, dtype=torch.float64)
    base = net(z, r, t, label, augment)
    for other in (
        net(z, r * 0.5, t, label, augment),
        net(z, r, t * 0.9, label, augment),
        net(z, r, t, label + 1, augment),
        net(z, r, t, label, augment * 2),
        net(z + 1, r, t, label, augment),
    ):
        assert ((base - other).flatten(1).norm(dim=1) > 1e-6).all()
    torch.testing.assert_close(net(z, r, t), net(z, r, t, label + 3, augment * 0))


def test_it_starts_near_zero_by_xaviers_law(seed):
    torch.manual_seed(seed)
    net = SongUNet(3, 16, channels=32, channel_mult=(1, 2), num_blocks=2, attention_resolutions=(8,), augment_dim=6)
    with torch.no_grad():
        out = net.eval()(torch.randn(4, 3, 16, 16), torch.zeros(4), torch.ones(4))
    assert 0 < out.abs().max() < 1e-2
    scales = {block.conv2: 1e-5 for block in parts(net, Block)} | {net.conv_out: 1e-5}
    for attention in parts(net, Attention):
        scales |= {attention.qkv: math.sqrt(0.2), attention.out: 1e-5}
    large = [m for m in parts(net, nn.Conv2d) + parts(net, nn.Linear) if m.weight.numel() > 2000]
    assert len(large) > 30
    for layer in large:
        out, into, *kernel = layer.weight.shape
        std = math.sqrt(2 / ((out + into) * math.prod(kernel))) * scales.get(layer, 1.0)
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
        assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(3) * std, rel=0.01)
        assert not layer.bias.any()


def test_class_embeddings_start_as_edms_and_no_class_as_nothing(seed):
    torch.manual_seed(seed)
    label = SongUNet(1, 4, channels=64, channel_mult=(1,), num_blocks=1, num_classes=10).mapping.label
    assert label is not None
    assert label.weight.shape == (11, 256)
    assert not label.weight[10].any()
    # A Xavier layer of 10 one-hot inputs and 256 outputs, times sqrt(10).
    assert label.weight[:10].std().item() == pytest.approx(math.sqrt(2 / 266 * 10), rel=0.05)


def test_dropout_acts_in_training_only(seed):
    net = small(seed, dropout=0.5)
    z, _, t, r = batch_of_points(seed, shape=(3, 6, 6))
    assert not torch.equal(net(z, r, t), net(z, r, t))
    net.eval()
    assert torch.equal(net(z, r, t), net(z, r, t))


def test_times_stay_in_fp32_under_autocast_and_norms_write_what_convolutions_read():
    net = SongUNet(1, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(), augment_dim=2)
    seen = []
    for layer in net.modules():
        if isinstance(layer, Mapping | GroupNorm):
            layer.register_forward_hook(lambda layer, _, out: seen.append((type(layer), out.dtype)))
    z, augment = torch.randn(2, 1, 8, 8), torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(z, torch.zeros(2), torch.ones(2), None, augment)
    # Two norms in each block, one in the attention of the middle, one at the end, and the mapping.
    norms = [(GroupNorm, torch.bfloat16)] * (2 * len(parts(net, Block)) + 2)
    assert seen == [(Mapping, torch.float32), *norms]
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_what_it_was_not_made_for_is_refused():
    with pytest.raises(ValueError, match="image_size is 30, expected a multiple of 4"):
        SongUNet(3, 30)
    net = small(0)
    z, _, t, r = batch_of_points(0, shape=(3, 6, 6))
    with pytest.raises(ValueError, match="a label was given to an unconditional network"):
        net(z, r, t, torch.zeros(7, dtype=torch.long))
    with pytest.raises(ValueError, match="augmentation labels were given"):
        net(z, r, t, augment=torch.zeros(7, 4, dtype=torch.float64))
