"""Counted work beside formulas, beside what real tensors count, and beside what autograd keeps."""

import random

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import DiTConfig, SongUNetConfig, UNetConfig
from fullstride.meanflow.planning.work import count_work
from fullstride.meanflow.training.build import build_model
from fullstride.measure.flops import count_flops

NETWORKS = {
    "unet": UNetConfig(channels=24, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[8]),
    "song_unet": SongUNetConfig(channels=16, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[8], dropout=0.0),
    "dit": DiTConfig(width=48, depth=2, heads=3, patch_size=2, class_conditional=True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_and_weights_are_those_of_real_tensors(name):
    config, shape = NETWORKS[name], (3, 16, 16)
    model = build_model(config, shape, 5)
    label = torch.zeros(1, dtype=torch.int64) if config.class_conditional else None
    counted = count_work(config, shape, 5)
    right = count_flops(lambda: model(torch.zeros(1, *shape), torch.zeros(1), torch.ones(1), label))
    assert counted.flops == right
    assert counted.parameters == sum(p.numel() for p in model.parameters())


def test_a_transformer_has_the_operations_of_its_formula():
    width, depth, side = 4 * random.randrange(6, 20), random.randrange(1, 4), 2 * random.randrange(3, 9)
    work = count_work(DiTConfig(width=width, depth=depth, heads=2, patch_size=2), (4, side, side), half=False)
    tokens = (side // 2) ** 2
    assert work.attention == 4 * depth * tokens**2 * width
    blocks = depth * (12 * width**2 * tokens + 6 * width**2)
    ends = 2 * tokens * 16 * width + 2 * width**2 + 2 * (256 * width + width**2)
    assert work.product == 2 * (blocks + ends)
    assert work.convolution == 0


def test_what_is_kept_grows_with_the_tokens_and_shrinks_with_the_bits():
    config = NETWORKS["dit"]
    small, large = (count_work(config, (3, side, side), 5, half=False) for side in (16, 32))
    # The embeddings of times and class do not grow.
    assert large.kept / small.kept == pytest.approx(4, rel=0.1)
    # The stream between the blocks stays in 32 bits.
    assert 0.5 < count_work(config, (3, 32, 32), 5).kept / large.kept < 0.75


def test_dropout_keeps_its_masks():
    values = vars(NETWORKS["song_unet"])
    without, with_masks = (count_work(SongUNetConfig(**values | {"dropout": p}), (3, 16, 16)) for p in (0.0, 0.3))
    assert with_masks.kept > 1.05 * without.kept
    assert with_masks.flops == without.flops


def test_recomputed_blocks_are_refused():
    with pytest.raises(ConfigError, match="model.recompute=true"):
        count_work(UNetConfig(recompute=True), (3, 32, 32))
