import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import EncodeOptions
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.sampling import encode
from fullstride.meanflow.sampling.encode import encode_command
from fullstride.meanflow.training.trainer import train
from tests.meanflow.sampling import fake_diffusers
from tests.meanflow.sampling.fake_diffusers import Folding, autoencoder
from tests.meanflow.training.test_trainer import config

__all__ = ["autoencoder"]  # a fixture


def write_pictures(folder: Path, counts: dict[str, int], grey: bool = False) -> None:
    rng = np.random.default_rng(3)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (8, 8) if grey else (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def made(tmp_path: Path, **settings) -> Path:
    defaults = {"image_size": 8, "flip": False, "half": False, "batch_size": 4, "workers": 0, "holdout": 0.1}
    defaults |= {"shard_size": 10, "device": "cpu", "vae": tmp_path / "vae", "out": tmp_path / "out"}
    encode_command(tmp_path / "pictures", EncodeOptions(**defaults | settings))
    return tmp_path / "out"


def inputs(data, split) -> torch.Tensor:
    return data.images(split, torch.arange(len(split)))


@pytest.mark.parametrize("half", [False, True])
def test_latents_are_the_moments_of_the_pictures_in_their_splits(autoencoder: Folding, tmp_path, half, capsys):
    counts = {"train/cat": 13, "train/dog": 12, "test/cat": 3, "test/dog": 4}
    write_pictures(tmp_path / "pictures", counts)
    out = made(tmp_path, flip=True, half=half)
    assert sorted(path.name for path in (out / "train").iterdir()) == [f"{i:05d}.safetensors" for i in range(3)]
    pictures = load_data(DataConfig("image_folder", str(tmp_path / "pictures"), image_size=8))
    latents = load_data(DataConfig("latents", str(out), latent_scale=1.0, hflip=True))
    assert (latents.num_classes, latents.image_shape) == (2, (4, 4, 4))
    rounding = 1e-3 if half else 0.0
    for split, expected in ((latents.train, pictures.train), (latents.test, pictures.test)):
        every = torch.arange(len(split))
        x = inputs(pictures, expected)
        torch.testing.assert_close(split.read(every).float(), fake_diffusers.moments(x), rtol=rounding, atol=rounding)
        assert split.flipped is not None
        mirrored = torch.stack([split.flipped[i] for i in every.tolist()]).float()
        torch.testing.assert_close(mirrored, fake_diffusers.moments(x.flip(-1)), rtol=rounding, atol=rounding)
        assert torch.equal(split.labels, expected.labels)
    told = f"data=latents data.path={out} data.num_classes=2 data.latent_scale=0.25 data.hflip=true"
    assert told in capsys.readouterr().out


def test_grey_pictures_without_classes_are_encoded_in_colour(autoencoder: Folding, tmp_path, capsys):
    write_pictures(tmp_path / "pictures", {"": 20}, grey=True)
    out = made(tmp_path, holdout=0.3)
    latents = load_data(DataConfig("latents", str(out), latent_scale=1.0))
    assert (len(latents.train), len(latents.test)) == (14, 6)
    pictures = load_data(DataConfig("image_folder", str(tmp_path / "pictures"), image_size=8, holdout=0.3))
    x = inputs(pictures, pictures.train).expand(-1, 3, -1, -1)
    assert torch.equal(latents.train.read(torch.arange(14)), fake_diffusers.moments(x))
    assert "num_classes" not in capsys.readouterr().out


def test_an_encoding_that_was_stopped_goes_on(autoencoder: Folding, tmp_path, monkeypatch):
    write_pictures(tmp_path / "pictures", {"train/a": 33, "test/a": 5})
    write, written = encode.write_shard, []

    def stopped(file: Path, *tensors: torch.Tensor) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(file)
        write(file, *tensors)

    with monkeypatch.context() as patched:
        patched.setattr(encode, "write_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path)
    with pytest.raises(
        ConfigError, match="out: its encoding is not finished; run the same `fullstride meanflow encode`"
    ):
        load_data(DataConfig("latents", str(tmp_path / "out"), latent_scale=1.0))
    assert autoencoder.encoded in (28, 30, 32)
    autoencoder.encoded = 0
    out = made(tmp_path)
    assert autoencoder.encoded == 33 - 20 + 5
    latents = load_data(DataConfig("latents", str(out), latent_scale=1.0))
    pictures = load_data(DataConfig("image_folder", str(tmp_path / "pictures"), image_size=8))
    expected = fake_diffusers.moments(inputs(pictures, pictures.train))
    assert torch.equal(latents.train.read(torch.arange(33)), expected)
    made(tmp_path)
    assert autoencoder.encoded == 18


def test_what_was_made_otherwise_is_not_gone_on_with(autoencoder: Folding, tmp_path):
    write_pictures(tmp_path / "pictures", {"train/a": 9, "test/a": 3})
    out = made(tmp_path)
    with pytest.raises(
        ConfigError, match=r"made with other settings \(flip: False -> True, half: False -> True\); choose another"
    ):
        made(tmp_path, flip=True, half=True)
    with pytest.raises(ConfigError, match=r"made with other settings \(pictures: .* -> .*\)"):
        made(tmp_path, image_size=4)
    (tmp_path / "vae" / "config.json").write_text("{} ")
    with pytest.raises(ConfigError, match=r"made with other settings \(vae: .* -> .*\)"):
        made(tmp_path)
    (out / "encoded.json").write_text("[")
    with pytest.raises(ConfigError, match="encoded.json: not JSON"):
        made(tmp_path)
    (out / "encoded.json").unlink()
    with pytest.raises(ConfigError, match=r"out: holds t[a-z]+/00000.safetensors already; delete it or choose another"):
        made(tmp_path)


def test_a_folder_that_another_process_encodes_into_is_refused(autoencoder: Folding, tmp_path):
    """Both would write a shard under the same passing name, and one of them move what the other has half written."""
    write_pictures(tmp_path / "pictures", {"train/a": 9, "test/a": 3})
    (tmp_path / "out").mkdir()
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    line = [sys.executable, "-c", hold, str(tmp_path / "out")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(
            ConfigError, match="out: another process is encoding there; wait until it ends, or choose another"
        ):
            made(tmp_path)
        assert autoencoder.encoded == 0
        other.communicate(b"\n")
    made(tmp_path)
    assert autoencoder.encoded == 12


def test_latents_of_a_folder_train(autoencoder: Folding, tmp_path):
    write_pictures(tmp_path / "pictures", {"train/a": 12, "train/b": 12, "test/a": 3})
    out = made(tmp_path, workers=1)
    data = DataConfig("latents", str(out), batch_size=8, workers=0, num_classes=2)
    run = train(dataclasses.replace(config(tmp_path, epochs=1, gradient_accumulation_steps=1), data=data))
    assert json.loads((run / "config.json").read_text())["data"]["num_classes"] == 2
