import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jvp

from fullstride.meanflow.models.common import GroupNorm, SelfAttention2d, attention
from fullstride.meanflow.models.unet import TimeEmbedding, UNet
from tests.meanflow.objective.test_derivative import random_unet

TINY = {"channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attention_resolutions": ()}


def test_the_default_has_between_51_and_56_million_parameters():
    with torch.device("meta"):
        net = UNet(3, 32)
    assert sum(p.numel() for p in net.parameters()) == 52_061_187


def test_the_default_attends_at_16_and_in_the_middle_only():
    with torch.device("meta"):
        net = UNet(3, 32)
    # 3 blocks down, 4 up at 16x16, and the first of the two middle blocks.
    assert sum(isinstance(m, SelfAttention2d) for m in net.modules()) == 3 + 4 + 1


@pytest.mark.parametrize("size", [6, 10])
@pytest.mark.parametrize("classes", [0, 3])
def test_output_has_the_shape_of_the_input_and_depends_on_every_input(size, classes, seed):
    net = random_unet(seed, num_classes=classes)
    z = torch.randn(4, 3, size, size, dtype=torch.float64)
    r, t = torch.full((4,), 0.2).double(), torch.full((4,), 0.8).double()
    label = torch.tensor([0, 1, 2, 0]) if classes else None
    out = net(z, r, t, label)
    assert out.shape == z.shape
    others = [net(z + 0.1, r, t, label), net(z, r + 0.1, t, label), net(z, r, t + 0.1, label)]
    if classes:
        others += [net(z, r, t, torch.tensor([1, 2, 0, 1])), net(z, r, t, None)]
    assert all((o - out).abs().min(0).values.max() > 1e-6 for o in others)


def test_it_starts_at_zero_with_a_gradient_for_the_last_layer():
    net = UNet(1, 8, **TINY)
    out = net(torch.randn(3, 1, 8, 8), torch.zeros(3), torch.ones(3))
    assert out.abs().max() == 0
    (out - 1).square().sum().backward()
    assert net.conv_out.weight.grad is not None
    assert net.conv_out.weight.grad.norm() > 0


def test_a_sample_does_not_see_its_batch(seed):
    net = random_unet(seed)
    z, t = torch.randn(5, 3, 6, 6, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(net(z, t / 2, t)[2:3], net(z[2:3], t[2:3] / 2, t[2:3]), rtol=1e-9, atol=1e-9)


def test_dropout_acts_in_training_only():
    net = random_unet(0, dropout=0.5)
    z, t = torch.randn(2, 3, 6, 6, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    assert not torch.equal(net.train()(z, t, t), net(z, t, t))
    assert torch.equal(net.eval()(z, t, t), net(z, t, t))


@pytest.mark.parametrize(("channels", "groups"), [(256, 32), (128, 32), (24, 6), (40, 10), (7, 1), (3, 1)])
def test_groups_hold_at_least_four_channels(channels, groups):
    assert GroupNorm(channels).groups == groups


@pytest.mark.parametrize("channels", [24, 40, 7])
def test_group_norm_is_the_librarys(channels, seed):
    ours = GroupNorm(channels).double()
    theirs = nn.GroupNorm(ours.groups, channels).double()
    nn.init.normal_(ours.weight)
    nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, channels, 5, 4, dtype=torch.float64) * 3 + 1
    torch.testing.assert_close(ours(x), theirs(x))


def test_attention_has_one_value_and_the_right_derivative_with_and_without_tangent(seed):
    q, k, v, *tangents = torch.randn(6, 2, 3, 11, 5, generator=torch.Generator().manual_seed(seed)).double()
    plain = attention(q, k, v)
    torch.testing.assert_close(plain, F.scaled_dot_product_attention(q, k, v))
    out, tangent = jvp(attention, (q, k, v), tuple(tangents))[:2]
    torch.testing.assert_close(out, plain)
    h = 1e-6
    ahead, behind = (attention(*(a + s * h * b for a, b in zip((q, k, v), tangents, strict=True))) for s in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


def test_time_embedding_spans_its_frequencies():
    time = torch.tensor([0.3])
    out = TimeEmbedding(6, 100.0)(time)[0]
    angles = 0.3 * torch.tensor([1.0, 10.0, 100.0])
    torch.testing.assert_close(out, torch.cat([angles.sin(), angles.cos()]))


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="image_size is 10, expected a multiple of 4: channel_mult has 3 levels"):
        UNet(1, 10, channel_mult=(1, 2, 2))
    with pytest.raises(ValueError, match="a label was given to an unconditional network"):
        UNet(1, 8, **TINY)(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="channels is 129, expected a multiple of the 2 heads"):
        SelfAttention2d(129, head_channels=64)


def test_times_are_embedded_in_fp32_under_autocast():
    net = UNet(1, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=())
    seen = []
    net.conditioning.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(torch.randn(2, 1, 8, 8), torch.zeros(2), torch.ones(2))
    assert seen == [torch.float32]
    assert out.isfinite().all()
