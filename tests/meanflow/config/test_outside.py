import json
import re
import sys
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.errors import ConfigError
from fullstride.meanflow.config.outside import loss_config, network_config
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.presets import config_from_dict
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.training.trainer import Trainer
from tests.meanflow.config.outside_package import write

NET, LOSS, DATA = "model=strangers.nets:Net", "loss=strangers.losses:Halved", "data=strangers.data:dots"
TRAINED = [NET, LOSS, DATA, "data.path=here", "model.width=6", "loss.share=0.25", "data.batch_size=16", "device=cpu"]
SHORT = ["ema.decays=[0.9]", "guard.check_step=false", "guard.check_tangents=false", "model.class_conditional=true"]


@pytest.fixture(autouse=True)
def strangers(tmp_path, monkeypatch):
    """A package that lies on the path of this test alone."""
    write(tmp_path / "theirs")
    monkeypatch.syspath_prepend(tmp_path / "theirs")
    yield
    network_config.cache_clear()
    loss_config.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "strangers"]:
        del sys.modules[name]


def test_what_a_class_adds_is_a_key_of_its_type():
    config = compose([*TRAINED, "model.depths=[2,3]"])
    assert asdict(config.model) | {"name": ""} == {
        "name": "", "class_conditional": False, "prediction": "velocity", "recompute": False, "width": 6,
        "depths": [2, 3],
    }  # fmt: skip
    assert vars(config.loss).items() >= {"name": "strangers.losses:Halved", "share": 0.25}.items()
    assert compose([NET]).model == compose([NET]).model
    saved = json.loads(json.dumps(asdict(config)))
    assert asdict(config_from_dict(saved)) == asdict(config)


def test_an_objective_is_not_imported_to_sample():
    saved = asdict(compose(TRAINED))
    saved["loss"]["name"] = "nowhere:Loss"
    assert vars(config_from_dict(saved).loss)["share"] == 0.25


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=nowhere.nets:Net", "model=nowhere.nets:Net: expected an importable module (No module named "),
        ("loss=strangers.broken:X", "importable module (division by zero); repair strangers.broken"),
        ("model=strangers.nets:Nett", "expected one of strangers.nets:Net, "),
        (
            "model=strangers.nets:Alien",
            "expected a class of torch.nn.Module, made as Network(channels, image_size",
        ),
        ("model=strangers.nets:function", "expected a class of torch.nn.Module"),
        ("loss=strangers.nets:Net", "expected a dataclass that inherits from MeanFlowLoss"),
        ("model.widht=3", "model.widht=3: no such key; did you mean model.width?"),
        ("model.width=wide", "model.width=wide: expected an integer"),
        ("loss.share=2", "loss.share=2.0: expected a share in [0, 1]"),
        ("epochs=7", "loss.share=0.5 epochs=7: expected other epochs"),
    ],
)
def test_a_mistake_says_what_was_expected(override, message):
    group = override.partition("=")[0]
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([override, *(given for given in (NET, LOSS) if not given.startswith(f"{group}="))])


@pytest.mark.parametrize("name", ["strangers.data:unmarked", "os:system", "strangers.nets:Net"])
def test_a_function_that_does_not_say_that_it_returns_a_data_set_is_not_called(name):
    with pytest.raises(ConfigError, match=r"expected a function, load\(path: Path \| None\) -> Dataset"):
        load_data(compose([f"data={name}", "data.path=rm"]).data)


def run(*words: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


def test_they_train_go_on_are_sampled_scored_and_planned(tmp_path):
    trained = [word.replace("=here", f"={tmp_path}") for word in TRAINED]
    given = ["meanflow", "train", *trained, *SHORT, f"output_dir={tmp_path}", "run_name=run"]
    run(*given, "epochs=1")
    assert "4 steps of 16" in run(*given, "epochs=2", "resume=true")
    folder = tmp_path / "run"
    config = json.loads((folder / "config.json").read_text())
    assert {f"{group}={config[group]['name']}" for group in ("model", "loss", "data")} == {NET, LOSS, DATA}
    other = [word for word in given if word != "loss.share=0.25"]
    assert "loss.share: 0.25 -> 0.5" in run(*other, "epochs=2", "resume=true", exit_code=2)
    run("meanflow", "sample", folder, "--num", "2", "--device", "cpu", "--out", tmp_path / "images")
    assert (tmp_path / "images" / "grid.png").is_file()
    run("meanflow", "evaluate", folder, "--num-samples", "8", "--device", "cpu")
    assert (folder / "evaluation.json").is_file()
    assert "this run" in run("meanflow", "plan", *trained, "precision=bf16")


def test_a_network_that_cannot_share_a_pass_is_trained_in_two(tmp_path, capfd):
    given = [*TRAINED, *SHORT, "epochs=1", f"output_dir={tmp_path}", "loss.meanflow_ratio=0.5"]
    found = {}
    for name in ("Net", "Normed"):
        config = compose([*given[1:], f"model=strangers.nets:{name}", f"run_name={name}"])
        found[name] = Trainer(config).objective.meanflow.split
    assert found == {"Net": "shared", "Normed": "static"}
    assert "split=auto of Normed: static, because torch's group_norm has no rule" in capfd.readouterr().err
