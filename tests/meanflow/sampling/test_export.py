import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import ExportOptions
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.shards import write_latents
from fullstride.meanflow.sampling import export
from fullstride.meanflow.sampling.export import export_command
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.sampling.samplers import meanflow_sample
from fullstride.meanflow.training.step import randomize_zero_layers
from fullstride.meanflow.training.trainer import Trainer, train
from tests.meanflow.training.test_derivative_check import MODELS as SMALL
from tests.meanflow.training.test_trainer import config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = dataclasses.replace(SMALL["dit"], depth=1, class_conditional=True)
    return train(config(tmp_path_factory.mktemp("runs"), epochs=1, model=model))


@pytest.mark.parametrize(("steps", "ema"), [pytest.param(1, None, marks=pytest.mark.thorough), (2, 0.5)])
def test_the_file_gives_the_networks_images_for_any_number(run, tmp_path, steps, ema, capsys):
    file = tmp_path / "new" / "sampler.pt2"
    export_command(run, ExportOptions(out=file, steps=steps, ema=ema, device="cpu"))
    assert "module()(noise, label)" in capsys.readouterr().out
    about = {export.ABOUT: ""}
    sampler, generator = torch.export.load(file, extra_files=about).module(), load_generator(run, "cpu", ema)
    for count in (1, 5, 8):
        noise, label = torch.randn(count, 1, 8, 8), torch.arange(count) % 10
        with torch.no_grad():
            expected = meanflow_sample(generator.model, noise, steps=steps, label=label).images
        torch.testing.assert_close(sampler(noise, label), expected, rtol=1e-5, atol=1e-5)
    assert json.loads(about[export.ABOUT]) | {"checkpoint": ""} == {
        "checkpoint": "", "ema": ema or 0.9, "steps": steps, "shape": [1, 8, 8], "num_classes": 10, "pictures": True,
    }  # fmt: skip
    assert list(file.parent.iterdir()) == [file]


# A transformer's file is compared with the network above.
@pytest.mark.parametrize("name", ["unet", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("song_unet", "dit"))])
def test_every_network_is_loaded_without_this_package_whatever_the_runs_memory_order(tmp_path, name, recwarn):
    write_latents(tmp_path / "data", torch.randn(40, 8, 8, 8), torch.arange(40) % 3)
    data = DataConfig("latents", str(tmp_path / "data"), batch_size=9, workers=0, latent_scale=0.5)
    model = dataclasses.replace(SMALL[name], class_conditional=False)
    settings = config(tmp_path, epochs=1, gradient_accumulation_steps=1, model=model, channels_last=name == "unet")
    trainer = Trainer(dataclasses.replace(settings, data=data))
    for average in trainer.state.ema.models.values():
        randomize_zero_layers(average, torch.Generator().manual_seed(0))
    trainer._save(must=True)
    export_command(trainer.run, ExportOptions(out=tmp_path / "sampler.pt2", steps=1, ema=None, device="cpu"))
    assert not [warning for warning in recwarn if "tensor" in str(warning.message)]
    noise = torch.randn(2, 4, 8, 8)
    torch.save(noise, tmp_path / "noise.pt")
    code = (
        "import sys, torch; program = torch.export.load('sampler.pt2'); noise = torch.load('noise.pt'); "
        "assert all(weight.is_contiguous() for weight in program.state_dict.values()); "
        "torch.save(program.module()(noise), 'images.pt'); assert not any('fullstride' in name for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = meanflow_sample(load_generator(trainer.run, "cpu").model, noise).images / 0.5
    torch.testing.assert_close(torch.load(tmp_path / "images.pt"), expected, rtol=1e-5, atol=1e-5)
    assert (expected - noise / 0.5).abs().max() > 0.1


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(run, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"sampler.pt: expected a file's name that ends in .pt2"):
        export_command(run, ExportOptions(out=tmp_path / "sampler.pt", steps=1, ema=None, device="cpu"))
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(ConfigError, match=r"folder.pt2: a folder, expected a file's name"):
        export_command(run, ExportOptions(out=tmp_path / "folder.pt2", steps=1, ema=None, device="cpu"))
    (tmp_path / "folder.pt2").rmdir()
    with pytest.raises(ConfigError, match="--ema 0.1: expected one of 0.9, 0.5"):
        export_command(run, ExportOptions(out=tmp_path / "sampler.pt2", steps=1, ema=0.1, device="cpu"))
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    (tmp_path / "sampler.pt2").write_text("earlier")
    with pytest.raises(RuntimeError, match="the exported sampler gives different images than the network"):
        export_command(run, ExportOptions(out=tmp_path / "sampler.pt2", steps=1, ema=None, device="cpu"))
    assert [(path.name, Path.read_text(path)) for path in tmp_path.iterdir()] == [("sampler.pt2", "earlier")]
