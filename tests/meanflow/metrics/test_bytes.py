import numpy as np
import pytest
import torch

from fullstride.meanflow.data.dataset import to_uint8
from fullstride.meanflow.metrics.features import byte_levels


def test_levels_are_those_of_the_saved_picture(seed):
    images = torch.randn(3, 3, 5, 7, generator=torch.Generator().manual_seed(seed))
    levels = byte_levels(images)
    assert levels.dtype == torch.float32
    np.testing.assert_array_equal(levels.numpy(), to_uint8(images).numpy())
    assert levels.min() == 0
    assert levels.max() == 255


def test_every_byte_comes_back():
    grey = torch.arange(256).float().reshape(1, 1, 16, 16) / 127.5 - 1
    levels = byte_levels(grey)
    assert levels.shape == (1, 3, 16, 16)
    for channel in levels[0]:
        assert torch.equal(channel.flatten(), torch.arange(256).float())


def test_what_is_no_picture_is_refused():
    with pytest.raises(ValueError, match="2 channels, expected 1 .grey. or 3"):
        byte_levels(torch.zeros(1, 2, 4, 4))
    images = torch.zeros(4, 1, 3, 3)
    images[1, 0, 2, 2] = float("nan")
    with pytest.raises(ValueError, match="1 of 4 images are not finite"):
        byte_levels(images)
