import copy

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.jvp import jvp
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.models.unet import Stage
from fullstride.meanflow.training.build import build_model
from tests.jvp.networks import saved_bytes


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("tiny")])
def test_a_step_is_the_same_and_keeps_less(name, seed):
    torch.manual_seed(seed)
    config = MODELS[name]()
    plain = build_model(config, (1, 8, 8), 0)
    for p in plain.parameters():
        if not p.detach().any():
            torch.nn.init.normal_(p, std=0.1)
    config = copy.copy(config)
    config.recompute = True
    again = build_model(config, (1, 8, 8), 0)
    again.load_state_dict(plain.state_dict())
    z, v, t = torch.randn(16, 1, 8, 8), torch.randn(16, 1, 8, 8), torch.rand(16)

    def step(model):
        torch.manual_seed(seed)
        given = {"both": True} if name.startswith("mit") else {}
        u, du = jvp(lambda z, t: model(z, t / 2, t, **given), (z, t), (v, torch.ones_like(t)))
        return u, (u - du.detach()).square().mean()

    gradients = [torch.autograd.grad(step(model)[1], list(model.parameters())) for model in (plain, again)]
    torch.testing.assert_close(*gradients)
    weights = sum(p.numel() * p.itemsize for p in plain.parameters())
    kept = [saved_bytes(lambda model=model: step(model)) - weights for model in (plain, again)]
    assert kept[1] < 0.5 * kept[0]


def test_a_network_without_blocks_to_recompute_is_refused(monkeypatch):
    monkeypatch.delattr(Stage, "recompute")
    config = MODELS["unet_tiny"]()
    build_model(config, (1, 8, 8), 0)
    config.recompute = True
    with pytest.raises(ConfigError, match="model.recompute=true model=unet_tiny: expected a network with blocks"):
        build_model(config, (1, 8, 8), 0)
