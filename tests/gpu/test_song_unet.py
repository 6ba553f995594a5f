"""Number formats of the CIFAR-10 recipe's network and augmentation on a GPU: `python -m pytest tests/gpu`."""

import pytest
import torch
import torch.nn.functional as F

from fullstride.device.precision import autocast, set_precision
from fullstride.meanflow.data.edm_augment import AugmentDraw, EdmAugment
from fullstride.meanflow.models.common import GroupNorm
from fullstride.meanflow.models.song_unet import Mapping, SongUNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_no_precision_of_the_network_moves_pictures_elsewhere(precision, seed):
    """Coordinates rounded to TF32's 11 bits would be off by hundredths of a pixel."""
    set_precision(precision, CUDA)
    augment = EdmAugment(1.0)
    draw = augment.draw(16, CUDA, torch.Generator(CUDA).manual_seed(seed))
    x = torch.rand(16, 3, 32, 32, device=CUDA) * 2 - 1
    exact = AugmentDraw(**{name: value.double().cpu() for name, value in vars(draw).items()})
    expected = augment.apply(x.double().cpu(), exact)
    torch.testing.assert_close(augment.apply(x, draw).double().cpu(), expected, rtol=0, atol=1e-4)


def test_under_autocast_times_stay_in_fp32_and_norms_are_rounded_once():
    net = SongUNet(3, 16, channels=32, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(8,)).cuda()
    times, norms = [], []
    for layer in net.modules():
        if isinstance(layer, Mapping):
            layer.register_forward_hook(lambda _, __, out: times.append(out.dtype))
        if isinstance(layer, GroupNorm):
            layer.register_forward_hook(lambda norm, given, out: norms.append((norm, given[0], out)))
    with autocast("bf16", CUDA):
        out = net(torch.randn(4, 3, 16, 16, device=CUDA), torch.zeros(4, device=CUDA), torch.ones(4, device=CUDA))
    assert set(times) == {torch.float32}
    for norm, x, found in norms:
        x, weight, bias = (a.detach().double() for a in (x, norm.weight, norm.bias))
        exact = F.group_norm(x, norm.groups, weight, bias, norm.eps)
        exact = F.silu(exact) if norm.act else exact
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
        assert found.dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
