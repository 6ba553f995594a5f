import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullstride.bert.training.optimizer import decayed, learning_rate, optimizer_of
from fullstride.bert.training.settings import OptimizerSettings, TrainSettings, settings_from, settings_of
from fullstride.errors import ConfigError
from fullstride.settings.fields import walk, written
from tests.bert.models import ODD, awake


def test_overrides_set_what_they_name_and_nothing_else():
    given = settings_of(["model=mini", "data=gcide", "optimizer.lr=1e-3", "data.whole_words=true", "run_name=a=b"])
    expected = TrainSettings()
    expected.model.size, expected.data.name, expected.optimizer.lr = "mini", "gcide", 1e-3
    expected.data.whole_words, expected.run_name = True, "a=b"
    assert given == expected
    assert settings_of([]) == TrainSettings()
    assert settings_from(dataclasses.asdict(given), Path("config.json")) == given


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", r"steps: expected key=value, such as steps=2000"),
        ("step=3", r"step=3: no such key; did you mean steps"),
        ("modle=tiny", r"modle=tiny: no such key; did you mean model[ ?]"),
        ("lr=1", r"lr=1: no such key; did you mean optimizer\.lr"),
        ("zzz=1", r"zzz=1: no such key; expected one of data, model, steps, accumulate, .*, optimizer, evaluation$"),
        ("steps=many", r"steps=many: expected an integer, got 'many'"),
        ("steps=1.5", r"steps=1\.5: expected an integer"),
        ("optimizer.lr=fast", r"expected a number"),
        ("optimizer.lr=nan", r"optimizer\.lr=nan: expected a finite number above 0"),
        ("data.pack=yes", r"expected true or false"),
        ("data=gcid", r"data\.name=gcid: expected one of gcide, .*did you mean gcide\?"),
        ("data.length=2", r"data\.length=2: expected at least 3"),
        ("data.mask_fraction=0.6", r"a share above 0 and at most 0\.5"),
        ("model.attention=flash", r"model\.attention=flash: expected one of"),
        ("run_name=../x", r"expected a folder's name"),
        ("accumulate=5", r"accumulate=5: expected a divisor of data\.batch_size=32"),
        ("optimizer.warmup_steps=1200", r"expected fewer than steps=1200"),
        ("seed=-1", r"a number from 0 to"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_can(override, message):
    with pytest.raises(ConfigError, match=message):
        settings_of([override])


def test_a_gpu_has_two_names():
    assert settings_of(["device=cuda"]) == settings_of(["device=gpu"])
    assert settings_of(["run_name=cuda"]).run_name == "cuda"


def test_an_unknown_key_of_a_group_is_answered_with_its_nearest():
    with pytest.raises(ConfigError, match=r"^data\.foo=1: no such key; did you mean data\.holdout\?$"):
        settings_of(["data.foo=1"])


def test_a_key_twice_and_settings_of_another_version_are_refused():
    with pytest.raises(ConfigError, match=r"data=gcide: data\.name is given twice"):
        settings_of(["data.name=gcide", "data=gcide"])
    values = dataclasses.asdict(TrainSettings())
    path = Path("runs/old/config.json")
    message = "^runs/old/config.json is not of this version's bert: colour, steps are missing or unknown; train again"
    with pytest.raises(ConfigError, match=message):
        settings_from({k: v for k, v in values.items() if k != "steps"} | {"colour": 1}, path)
    kept = {key: value for key, value in values.items() if key not in ("track", "project")}  # of an earlier version
    assert settings_from(kept, path) == TrainSettings()
    message = "bert: key0, key1, key2, key3, key4 and 4 more are missing or unknown; train again"
    with pytest.raises(ConfigError, match=message):
        settings_from(values | {f"key{i}": i for i in range(9)}, path)


def test_every_key_can_be_set_to_its_own_default():
    given = [f"{key.name}={written(key.value)}" for key in walk(TrainSettings())]
    assert settings_of(given) == TrainSettings()


@pytest.mark.parametrize("decay", ["linear", "constant"])
def test_the_rate_rises_and_falls_in_straight_lines(decay):
    given = OptimizerSettings(lr=0.4, warmup_steps=4, decay=decay)
    rates = [learning_rate(given, 12, step, np) for step in range(12)]
    np.testing.assert_allclose(rates[:4], [0.1, 0.2, 0.3, 0.4])
    expected = 0.4 * np.arange(8, 0, -1) / 8 if decay == "linear" else np.full(8, 0.4)
    np.testing.assert_allclose(rates[4:], expected)
    inside = [float(learning_rate(given, 12, jnp.asarray(step))) for step in range(12)]
    np.testing.assert_allclose(inside, rates, rtol=1e-6)
    assert learning_rate(OptimizerSettings(lr=0.4, warmup_steps=0), 12, 0, np) == 0.4


def test_biases_and_norms_are_not_decayed_and_gradients_are_clipped():
    model = awake(ODD, 0)
    mask = decayed(eqx.filter(model.layers[0], eqx.is_inexact_array))
    assert mask.attention.query.weight
    assert not mask.attention.query.bias
    assert not mask.attention_norm.weight
    given = OptimizerSettings(lr=0.1, warmup_steps=0, weight_decay=0.5, grad_clip=1.0, decay="constant")
    optimizer = optimizer_of(given, 10)
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):
        nothing = {name: jnp.zeros_like(x) for name, x in params.items()}
        updates: Any = optimizer.update(nothing, optimizer.init(params), params)[0]
        np.testing.assert_allclose(updates["matrix"], -0.05, rtol=1e-6)
        np.testing.assert_array_equal(updates["vector"], 0)
        large = {name: 100 * jnp.ones_like(x) for name, x in params.items()}
        _, state = optimizer.update(large, optimizer.init(params), params)
    first = optax.tree.get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(first), 0.1, rtol=1e-5)
