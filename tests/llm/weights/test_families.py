import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.llm.families import FAMILIES, Family
from fullstride.llm.weights import load

# Qwen2's layers under names of its own, and a switch that nobody has written.
TOY = Family(
    qkv_bias=True,
    fixed={"toy_gate": (False,)},
    tensors={f"self_attn.shift_{name}": f"{name}_bias" for name in "qkv"},
)


@pytest.fixture
def folder(tiny_qwen2, tmp_path, monkeypatch):
    """The tiny Qwen2 as a folder of the toy family has it."""
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    made = shutil.copytree(tiny_qwen2, tmp_path / "toy")
    (made / "model.safetensors.index.json").unlink()
    for file in made.glob("*.safetensors"):
        save_file({_toys(name): value for name, value in load_file(file).items()}, file)
    _change(made, model_type="toy")
    return made


def _toys(name):
    for part in "qkv":
        name = name.replace(f"self_attn.{part}_proj.bias", f"self_attn.shift_{part}")
    return name


def _change(folder, **settings):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


def test_a_family_of_another_file_is_a_row(folder, tiny_qwen2):
    toy, qwen2 = load(folder), load(tiny_qwen2)
    assert toy.config.architecture == "toy"
    assert toy.config.qkv_bias
    assert list(toy.parameters) == list(qwen2.parameters)
    for name, value in toy.parameters.items():
        np.testing.assert_array_equal(value, qwen2.parameters[name])


def test_what_a_family_has_not_written_is_refused(folder):
    _change(folder, toy_gate=True)
    with pytest.raises(ConfigError, match="toy_gate=True: models with it are not supported, only False"):
        load(folder)


def test_a_family_that_is_not_there_is_refused_by_the_names_of_those_that_are(folder):
    _change(folder, model_type="other")
    with pytest.raises(ConfigError, match="model_type=other: expected one of llama, qwen2, qwen3, toy"):
        load(folder)
