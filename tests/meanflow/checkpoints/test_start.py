"""A run that starts from other weights: all of them, and what does not fit named."""

import argparse
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import find_checkpoint, read_group
from fullstride.meanflow.checkpoints.start import read_start, start_from
from fullstride.meanflow.config.networks import DiTConfig, SongUNetConfig
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.presets import LOSSES
from fullstride.meanflow.config.schema import DataConfig, EmaConfig, GuardConfig, OptimizerConfig, TrainConfig
from fullstride.meanflow.training.build import build_model
from fullstride.meanflow.training.trainer import Trainer, train
from fullstride.runs.folder import run_config
from tests.meanflow.models.py_meanflow_checkpoint import checkpoint
from tests.meanflow.models.test_import_dit import official

MODEL = DiTConfig(width=24, depth=2, heads=3, class_conditional=True)


def config(folder: Path, **kwargs) -> TrainConfig:
    base = TrainConfig(
        data=DataConfig(batch_size=100),
        model=MODEL,
        ema=EmaConfig([0.9, 0.5]),
        guard=GuardConfig(check_tangents=False, check_step=False),
        epochs=1,
        device="cpu",
        run_name="first",
        output_dir=str(folder),
    )
    return dataclasses.replace(base, **kwargs)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return train(config(tmp_path_factory.mktemp("start")))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.state.model.state_dict())


def test_a_run_starts_from_the_first_average_of_another_and_so_do_its_averages(first, tmp_path):
    given = {"init_from": str(first), "run_name": "second", "optimizer": OptimizerConfig(lr=1e-3)}
    started = Trainer(config(tmp_path, loss=LOSSES["imf"](), **given))
    expected = read_group(find_checkpoint(first), "ema_0.9")
    for found in (weights(started), *(dict(x.state_dict()) for x in started.state.ema.models.values())):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert run_config(started.run)["init_from"] == str(first)


def test_one_file_of_a_checkpoint_and_a_copy_of_it_are_those_weights(first, tmp_path):
    file = find_checkpoint(first) / "model.safetensors"
    copied = Path(shutil.copy(file, tmp_path / "exported.safetensors"))
    expected = read_group(find_checkpoint(first), "model")
    for name, path in {"a": file, "b": copied}.items():
        started = weights(Trainer(config(tmp_path, init_from=str(path), run_name=name)))
        assert all(torch.equal(started[k], expected[k]) for k in expected)


def test_resuming_does_not_read_the_file_again(first, tmp_path):
    copied = Path(shutil.copy(find_checkpoint(first) / "model.safetensors", tmp_path / "w.safetensors"))
    straight = train(config(tmp_path, init_from=str(copied), epochs=2, run_name="straight"))
    run = train(config(tmp_path, init_from=str(copied), run_name="stopped"))
    copied.unlink()
    train(config(tmp_path, init_from=str(copied), epochs=2, run_name="stopped", resume=True))
    a, b = (read_group(find_checkpoint(x), "model") for x in (straight, run))
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(ConfigError, match="no such file"):
        Trainer(config(tmp_path, init_from=str(copied), run_name="other", resume=True))
    assert not (tmp_path / "other").exists()


def test_other_classes_begin_anew_and_no_class_stays(first, tmp_path, capfd):
    data = DataConfig("multiclass", batch_size=100)
    other = weights(Trainer(config(tmp_path, init_from=str(first), data=data, run_name="four")))
    table, before = other["conditioning.label.weight"], read_group(find_checkpoint(first), "ema_0.9")
    assert len(table) == 5
    assert torch.equal(table[-1], before["conditioning.label.weight"][-1])
    assert "conditioning.label.weight starts anew for 4 classes" in capfd.readouterr().err
    none = dataclasses.replace(MODEL, class_conditional=False)
    without = weights(Trainer(config(tmp_path, init_from=str(first), model=none, run_name="none")))
    assert "conditioning.label.weight is left out" in capfd.readouterr().err
    assert all(torch.equal(x, before[k]) for k, x in without.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"depth": 3}, r"missing: blocks\.\*\.attention\.out\.bias, .*expected the same network"),
        ({"depth": 1}, r"unknown: blocks\.\*\.attention\.out\.bias, "),
        ({"width": 48}, r"conditioning\.gap\.hidden\.bias \(24,\) for \(48,\)"),
        ({"heads": 6}, "other settings: model.heads=3 there and 6 here"),
        (
            {"qk_norm": True},
            r"model\.qk_norm=False there and True here; missing: blocks\.\*\.attention\.qk_weight \(2\)",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_and_changes_nothing(first, change, named):
    wanted = dataclasses.replace(MODEL, **change)
    net = build_model(wanted, (1, 8, 8), 10)
    before = {k: x.clone() for k, x in net.state_dict().items()}
    with pytest.raises(ConfigError, match=named):
        start_from(net, read_start(first), wanted)
    assert all(torch.equal(x, before[k]) for k, x in net.state_dict().items())


def test_a_flow_is_a_start_for_blocks_that_see_r_alone(first):
    nets = [build_model(dataclasses.replace(MODEL, decoupled_blocks=n), (1, 8, 8), 10) for n in (0, 1)]
    for net, n in zip(nets, (0, 1), strict=True):
        start_from(net, read_start(first), dataclasses.replace(MODEL, decoupled_blocks=n))
    z, t, label = torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([0, 5, 9])
    found, expected = (net(z, t, t, label) for net in reversed(nets))
    torch.testing.assert_close(found, expected)
    assert expected.abs().max() > 1e-3


def test_a_flow_is_a_start_for_a_network_that_predicts_images(first):
    wanted = dataclasses.replace(MODEL, prediction="x")
    net = build_model(wanted, (1, 8, 8), 10)
    assert "predict velocity, which model.prediction=x has to unlearn" in start_from(net, read_start(first), wanted)[0]
    flow = read_start(first).tensors
    assert all(torch.equal(x, flow[name.removeprefix("network.")]) for name, x in net.state_dict().items())


def test_a_network_that_predicts_images_is_a_start_for_both(first, tmp_path, capfd):
    wanted = dataclasses.replace(MODEL, prediction="x")
    run = train(config(tmp_path, model=wanted, run_name="images"))
    expected = read_group(find_checkpoint(run), "ema_0.9")
    again = weights(Trainer(config(tmp_path, model=wanted, init_from=str(run), run_name="again")))
    assert all(torch.equal(again[name], x) for name, x in expected.items())
    flow = weights(Trainer(config(tmp_path, init_from=str(run), run_name="flow")))
    assert "the weights predict x, which model.prediction=velocity has to unlearn" in capfd.readouterr().err
    assert all(torch.equal(flow[name.removeprefix("network.")], x) for name, x in expected.items())


def test_weights_that_are_not_finite_are_refused(first):
    given = read_start(first)
    given.tensors["patch_out.bias"][0] = float("nan")
    with pytest.raises(ConfigError, match="not finite: patch_out.bias"):
        start_from(build_model(MODEL, (1, 8, 8), 10), given, MODEL)


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.fixture
def sit(seed) -> dict[str, torch.Tensor]:
    return official(torch.Generator().manual_seed(seed), 2)


def dit() -> torch.nn.Module:
    return build_model(MODEL, (3, 6, 6), 5)


def test_a_training_of_sit_is_recognised_by_what_its_file_says(sit, tmp_path):
    told = argparse.Namespace(path_type="Linear", prediction="velocity", lr=1e-4)
    content = {"model": {k: x + 1 for k, x in sit.items()}, "ema": sit, "opt": {"state": {}}, "args": told}
    net, named = dit(), dit()
    start_from(net, read_start(save(tmp_path / "a.pt", content)), MODEL)
    assert torch.equal(net.state_dict()["patch_in.bias"], sit["x_embedder.proj.bias"].float())
    content["args"] = argparse.Namespace(path_type="GVP", prediction="velocity")
    with pytest.raises(ConfigError, match="trained with path_type=GVP, expected path_type=Linear"):
        start_from(dit(), read_start(save(tmp_path / "b.pt", content)), MODEL)
    alone = read_start(save(tmp_path / "c.pt", {f"module.{k}": x for k, x in sit.items()}))
    with pytest.raises(ConfigError, match="sit and dit have these names .* init_form=sit or init_form=dit"):
        start_from(dit(), alone, MODEL)
    start_from(named, alone, MODEL, "sit")
    assert all(torch.equal(x, net.state_dict()[k]) for k, x in named.state_dict().items() if ".gap.hidden" not in k)


def test_weights_of_another_size_are_named_after_conversion(sit, tmp_path):
    save_file({k: x.contiguous() for k, x in sit.items()}, tmp_path / "sit.safetensors")
    deeper = dataclasses.replace(MODEL, depth=3)
    with pytest.raises(ConfigError, match=r"sit.safetensors: .* missing: blocks\.\*\.attention\.out\.bias"):
        start_from(build_model(deeper, (3, 6, 6), 5), read_start(tmp_path / "sit.safetensors"), deeper, "sit")


def test_py_meanflow_is_recognised_and_its_average_taken(tmp_path):
    song = SongUNetConfig(channels=8, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[3])
    state = checkpoint()
    net = build_model(song, (2, 6, 6), 0)
    start_from(net, read_start(save(tmp_path / "checkpoint-last.pth", {"model": state, "epoch": 3})), song)
    assert torch.equal(net.state_dict()["mapping.hidden.weight"], state["net_ema1.map_layer0.weight"].float())
    with pytest.raises(ConfigError, match="for a DiT, expected model=song_unet"):
        start_from(dit(), read_start(tmp_path / "checkpoint-last.pth"), MODEL)


class Unknown:
    """A class that a file asks for."""


@pytest.mark.parametrize(
    ("content", "message"),
    [(Unknown(), "cannot be read as weights alone"), ({"epoch": 3}, "no weights by name"), ({}, "no weights by name")],
)
def test_a_file_without_weights_is_refused(content, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_start(save(tmp_path / "x.pt", content))


def test_half_a_file_is_refused(first, tmp_path):
    whole = (find_checkpoint(first) / "model.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        read_start(tmp_path / "half.safetensors")


def test_a_form_without_weights_is_refused():
    with pytest.raises(ConfigError, match="init_form=sit: expected init_from=PATH"):
        compose(["init_form=sit"])
    assert compose(["init_from=a.pt", "init_form=sit"]).init_form == "sit"
