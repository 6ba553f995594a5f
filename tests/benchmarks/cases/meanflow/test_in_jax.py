"""The networks and the loss in JAX against PyTorch's, in fp32 with fresh random weights and inputs."""

import jax
import numpy as np
import pytest
import torch

from benchmarks.cases.meanflow.in_jax.loss import JaxLoss, network_of
from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import DiTConfig, SongUNetConfig, UNetConfig
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.training.build import build_model
from fullstride.meanflow.training.step import randomize_zero_layers
from tests.helpers.compiled_soon import compiled_soon, flag_xla  # noqa: F401

flag_xla()

pytestmark = pytest.mark.usefixtures("compiled_soon")
SHAPE, BATCH = (3, 8, 8), 5
UNET = UNetConfig(channels=8, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[])
DIT = DiTConfig(patch_size=2, width=24, depth=1, heads=3, qk_norm=True, time_scale=3.0)


def arrays_of(model):
    return {name: x.detach().numpy() for name, x in (*model.named_parameters(), *model.named_buffers())}


def draw(ratio, seed):
    """The loss of a share of the samples, and what it is taken at."""
    loss = MeanFlowLoss(ratio, weighting_power=0.75 if ratio else 0.0, weighting_eps=1e-3, split="static")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, *SHAPE, generator=generator)
    e, t, r = loss.draw(x, generator)
    return loss, {"x": x, "e": e, "t": t, "r": r}


def off(found, right):
    return np.linalg.norm(np.asarray(found) - right) / np.linalg.norm(right)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (UNET, 3),
        pytest.param(UNET, 0, marks=pytest.mark.thorough),
        pytest.param(UNET, BATCH, marks=pytest.mark.thorough),
        *((DIT, count) for count in (0, 3, BATCH)),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_loss_and_every_gradient_are_pytorchs(config, count, seed):
    seed = seed or torch.seed() % 2**31
    model = randomize_zero_layers(build_model(config, SHAPE, 0), torch.Generator().manual_seed(seed))
    loss, drawn = draw(count / BATCH, seed)
    value = loss.at(model, *drawn.values())[0]
    value.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    right = network_of(config, arrays_of(model) | gradients)

    given = {k: a.numpy() if a.ndim == 1 else a.permute(0, 2, 3, 1).numpy() for k, a in drawn.items()}
    own = JaxLoss(count, loss.weighting_power, loss.weighting_eps)
    found, grads = jax.jit(jax.value_and_grad(own))(network_of(config, arrays_of(model)), given)
    assert off(found, value.item()) < 1e-5
    paths = jax.tree_util.tree_leaves_with_path(grads)
    assert len(paths) == len(gradients)
    for (path, gradient), expected in zip(paths, jax.tree.leaves(right), strict=True):
        assert off(gradient, expected) < 1e-5, (seed, jax.tree_util.keystr(path))


def test_another_network_is_refused():
    with pytest.raises(ConfigError, match="song_unet: expected a U-Net or a DiT"):
        network_of(SongUNetConfig(), {})
