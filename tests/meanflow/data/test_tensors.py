"""Samples of any rank from files of tensors, with labels and conditions."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import ExportOptions, SampleOptions, ScoreOptions
from fullstride.meanflow.config.networks import TokenDiTConfig, UNetConfig
from fullstride.meanflow.config.outside import network_config
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.presets import LOSSES
from fullstride.meanflow.config.schema import DataConfig, TrainConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation.checkpoint import evaluate_checkpoint
from fullstride.meanflow.planning.plan import data_of
from fullstride.meanflow.sampling.export import export_command
from fullstride.meanflow.sampling.generate import load_generator, sample_command
from fullstride.meanflow.training.trainer import Trainer, train
from tests.meanflow.checkpoints.test_start import config

COUNT = 60


def content(seed: int, shape: tuple[int, ...] = (2, 6), conditions: tuple[int, ...] = ()) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {"samples": torch.randn(COUNT, *shape, generator=g), "labels": torch.randint(3, (COUNT,), generator=g)}
    found["labels"][:3] = torch.arange(3)
    return found | ({"conditions": torch.randn(COUNT, *conditions, generator=g)} if conditions else {})


def saved(folder: Path, tensors: dict[str, Tensor], name: str = "data.safetensors") -> Path:
    """The tensors in a file of the name's form."""
    file = folder / name
    if file.suffix == ".npy":
        for key, x in tensors.items():
            np.save(file if key == "samples" else file.with_suffix(f".{key}.npy"), x.numpy())
    elif file.suffix == ".pt":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return file


def read(path: Path, **keys):
    return load_data(DataConfig("tensors", path=str(path), **keys))


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
@pytest.mark.parametrize(("shape", "conditions"), [((5,), ()), ((2, 6), (4,)), ((1, 2, 4, 6), (3, 5))])
def test_every_form_of_file_gives_the_same_rows(name, shape, conditions, tmp_path, seed):
    tensors = content(seed, shape, conditions)
    data = read(saved(tmp_path, tensors, name), holdout=0.2)
    assert (data.image_shape, data.condition_shape, data.num_classes, data.pixels) == (shape, conditions, 3, False)
    assert len(data.train) + len(data.test) == COUNT
    rows = {tuple(x.flatten().tolist()): i for i, x in enumerate(tensors["samples"])}
    seen = set()
    for split in (data.train, data.test):
        every = torch.arange(len(split))
        found = [rows[tuple(x.flatten().tolist())] for x in data.images(split, every)]
        assert torch.equal(split.labels, tensors["labels"][found])
        given = data.conditions(split, every)
        if conditions:
            assert given is not None
            assert torch.equal(given, tensors["conditions"][found])
        else:
            assert given is None
        seen |= set(found)
    assert seen == set(range(COUNT))
    assert data.fingerprint == read(tmp_path / name, holdout=0.2).fingerprint
    tensors["samples"][-1] += 1
    assert data.fingerprint != read(saved(tmp_path, tensors, name), holdout=0.2).fingerprint


def test_a_folder_has_its_own_halves_and_a_tensor_alone_no_classes(tmp_path, seed, capfd):
    tensors = content(seed)
    saved(tmp_path, tensors, "train.pt")
    saved(tmp_path, {k: x[:9] for k, x in tensors.items()}, "test.safetensors")
    data = read(tmp_path)
    assert (len(data.train), len(data.test)) == (COUNT, 9)
    torch.save(tensors["samples"].double() * 50, tmp_path / "alone.pt")
    capfd.readouterr()
    alone = read(tmp_path / "alone.pt")
    assert alone.num_classes == 0
    spread = 50 * tensors["samples"].std().item()
    assert f"the samples' standard deviation is {spread:.3g}; times" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"data.holdout=0.2: expected none with .*test.safetensors"):
        read(tmp_path, holdout=0.2)
    saved(tmp_path, content(seed, (2, 4)), "test.safetensors")
    with pytest.raises(
        ConfigError, match=r"holds samples \(2, 4\), labels, conditions \(\), expected samples \(2, 6\)"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": torch.ones(COUNT, 3, dtype=torch.int32)}, "samples are torch.int32, expected floating"),
        ({"samples": torch.ones(COUNT)}, r"samples of shape \(60,\), expected \(n, ...\)"),
        ({"samples": torch.full((COUNT, 2), torch.nan)}, "row 0 of samples: holds numbers that are not finite"),
        ({"labels": torch.zeros(COUNT)}, "labels are torch.float32"),
        ({"labels": torch.full((COUNT,), -1)}, "labels are torch.int64 .* expected an integer of 0 or more"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"of shape \(3,\), expected an integer"),
        ({"conditions": torch.zeros(3, 2)}, r"conditions of shape \(3, 2\), expected \(60, length\)"),
        ({"conditions": torch.zeros(COUNT, 2, 2, 2)}, "expected .60, length. or .60, tokens, length."),
    ],
)
def test_what_is_no_data_is_refused(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read(saved(tmp_path, content(0) | change))


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected a file .* or a folder with such files named train and test"):
        read(tmp_path)
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="no samples in it; it holds x"):
        read(tmp_path / "x.safetensors")
    (tmp_path / "x.npy").write_bytes(b"no")
    with pytest.raises(ConfigError, match="x.npy: cannot be read"):
        read(tmp_path / "x.npy")
    with pytest.raises(ConfigError, match=r"label 2 with data.num_classes=2"):
        read(saved(tmp_path, content(0)), num_classes=2)
    for override in ("data.hflip=true", "data.image_size=8", "data.latent_scale=2", "data.augment=0.1"):
        with pytest.raises(ConfigError, match="expected"):
            compose(["data=tensors", "data.path=x.npy", override])


def run_config(folder: Path, path: Path, **keys) -> TrainConfig:
    model = TokenDiTConfig(width=12, depth=1, heads=2, patch_sizes=[1], class_conditional=True)
    given = {"model": model, "data": DataConfig("tensors", path=str(path), batch_size=20), "loss": LOSSES["mse"]()}
    return config(folder, **given | keys)


@pytest.mark.parametrize("conditions", [(), (4,), (3, 5)])
def test_a_run_learns_samples_and_is_scored(conditions, tmp_path, seed, capfd):
    file = saved(tmp_path, content(seed, (2, 6), conditions))
    run = train(run_config(tmp_path, file, loss=LOSSES["meanflow"]()))
    assert "on 54 samples (2x6) of data=tensors" in capfd.readouterr().out
    given: dict[str, Any] = {"conditions": file} if conditions else {}
    made = load_file(sample_command(run, SampleOptions(steps=2, num=7, batch_size=3, device="cpu", **given)))
    assert made["samples"].shape == (7, 2, 6)
    one_by_one = SampleOptions(steps=2, num=7, batch_size=7, device="cpu", **given)
    again = load_file(sample_command(run, one_by_one))["samples"]
    torch.testing.assert_close(again, made["samples"], rtol=1e-4, atol=1e-5)
    scores, floor = evaluate_checkpoint(run, ScoreOptions(num_samples=6, device="cpu"), [("euler", 2)])
    assert scores[0].score.num_samples == 6
    assert floor.features == {}
    if conditions:
        shift = {"conditions": content(seed, (2, 6), conditions)["conditions"] + 3}
        other = saved(tmp_path, shift, "other.safetensors")
        moved = load_file(sample_command(run, SampleOptions(steps=2, num=7, device="cpu", conditions=other)))["samples"]
        assert load_generator(run, "cpu").data.condition_shape == conditions
        assert not torch.equal(moved, made["samples"])


class Conditioned(nn.Module):
    """A network of another package, whose output is a function of the condition alone."""

    def __init__(self, channels: int, sizes: Any, num_classes: int = 0, condition_shape: tuple[int, ...] = ()):
        super().__init__()
        self.out, self.shape = nn.Linear(condition_shape[-1], channels * sizes[0]), (channels, *sizes)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Any = None, condition: Any = None) -> Tensor:
        return self.out(condition.mean(1)).unflatten(1, self.shape) + 0 * (z + (r + t)[:, None, None])


def test_a_network_of_another_package_gets_conditions_in_their_shape_by_name(tmp_path, seed):
    file = saved(tmp_path, content(seed, (2, 6), (3, 5)))
    model = network_config(f"{__name__}:Conditioned")()
    run = train(run_config(tmp_path, file, loss=LOSSES["meanflow"](), model=model))
    made = load_file(sample_command(run, SampleOptions(steps=1, num=60, device="cpu", conditions=file)))["samples"]
    assert made.shape == (60, 2, 6)


def test_what_conditions_cannot_do_is_refused(tmp_path, seed):
    plain = train(run_config(tmp_path, saved(tmp_path, content(seed)), run_name="plain"))
    file = saved(tmp_path, content(seed, (2, 6), (4,)), "with.safetensors")
    run = train(run_config(tmp_path, file, run_name="with"))
    wrong = saved(tmp_path, content(seed, (2, 6), (5,)), "wrong.safetensors")
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (plain, {"conditions": file}, "this run has none; leave it out"),
        (run, {}, r"no --conditions FILE; expected conditions of shape \(4,\)"),
        (run, {"conditions": wrong}, r"conditions of shape \(5,\), expected \(4,\)"),
        (run, {"conditions": file, "backend": "graph"}, "the device is cpu"),
    ]
    for place, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            sample_command(place, SampleOptions(steps=1, num=2, device="cpu", **options))
    with pytest.raises(ConfigError, match="takes conditions, expected one without"):
        export_command(run, ExportOptions(out=tmp_path / "x.pt2", device="cpu"))
    unet = UNetConfig(channels=4, channel_mult=[1], num_blocks=1, attention_resolutions=[])
    with pytest.raises(ConfigError, match="model=unet with samples of shape .2, 6.: expected square pictures"):
        Trainer(run_config(tmp_path, file, run_name="unet", model=unet))
    square = saved(tmp_path, content(seed, (2, 4, 4), (4,)), "square.safetensors")
    with pytest.raises(ConfigError, match="model=unet with data that have conditions"):
        Trainer(run_config(tmp_path, square, run_name="unet", model=unet))


def test_a_plan_reads_what_lies_in_a_folder(tmp_path, seed):
    file = saved(tmp_path, content(seed))
    given = run_config(tmp_path, file)
    assert data_of(given, None) == (54, (2, 6), 3)
    assert data_of(given, 1000) == (1000, (2, 6), 3)
    conditioned = dataclasses.replace(given.data, path=str(saved(tmp_path, content(seed, (2, 6), (4,)), "b.pt")))
    with pytest.raises(ConfigError, match="have conditions, expected none"):
        data_of(dataclasses.replace(given, data=conditioned), None)
