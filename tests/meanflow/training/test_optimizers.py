"""The optimizers of a run: which weights are whose, and their state."""

import dataclasses

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import find_checkpoint, read_group
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.schema import OptimizerConfig
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.training.optimizers import build_optimizer, description, load_optimizer, optimizer_tensors
from fullstride.meanflow.training.trainer import train
from tests.meanflow.checkpoints.test_start import config
from tests.step.torch.test_muon import give_gradients


def network() -> nn.Module:
    return SongUNet(1, 4, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=(), num_classes=3)


def test_a_network_is_split_into_matrices_and_the_rest_and_its_state_is_kept(seed):
    torch.manual_seed(seed)
    net = network()
    optimizer = build_optimizer(OptimizerConfig("muon", lr=0.01), net)
    first, second = (
        {id(p) for p in each.param_groups[0]["params"]}
        for each in optimizer.members  # pyright: ignore[reportAttributeAccessIssue]
    )
    named = dict(net.named_parameters())
    assert {id(p) for p in named.values()} == first | second
    for name, p in named.items():
        assert (id(p) in first) == (p.ndim > 1 and "label" not in name), name
    assert "weights in" in (told := description(optimizer))
    assert told.index("Muon") < told.index("AdamW")
    give_gradients(list(net.parameters()), seed)
    optimizer.step()
    kept = optimizer_tensors(optimizer)
    other = build_optimizer(OptimizerConfig("muon", lr=0.01), network())
    load_optimizer(other, kept)
    again = optimizer_tensors(other)
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[k], kept[k]) for k in kept)


def test_what_only_muon_has_is_refused_of_adamw_and_whole_matrices_of_fsdp():
    assert dataclasses.asdict(compose(["optimizer=muon", "optimizer.momentum=0.9"]).optimizer)["momentum"] == 0.9
    with pytest.raises(ConfigError, match="momentum=0.9 optimizer=adamw: expected optimizer=muon"):
        compose(["optimizer.momentum=0.9"])
    with pytest.raises(ConfigError, match="optimizer=muon distributed=fsdp: expected distributed=ddp"):
        compose(["optimizer=muon", "distributed=fsdp"])


def test_a_run_by_muon_learns_says_whose_weights_are_whose_and_goes_on_exactly(tmp_path, capfd):
    given = {"optimizer": OptimizerConfig("muon", lr=1e-3, warmup_steps=2)}
    straight = train(config(tmp_path, **given, epochs=2, run_name="straight"))
    told = capfd.readouterr().err
    assert "optimizer=muon: " in told
    train(config(tmp_path, **given, run_name="again"))
    again = train(config(tmp_path, **given, epochs=2, run_name="again", resume=True))
    for name in ("model", "optimizer"):
        a, b = (read_group(find_checkpoint(run), name) for run in (straight, again))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)
