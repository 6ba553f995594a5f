import json
import re

import numpy as np
import pytest

from benchmarks.harness.experiment_table import mean_and_spread, tables
from benchmarks.harness.seeds import (
    Claim,
    ExperimentResult,
    Outcome,
    PartResult,
    check_experiment,
    mean,
    spread,
    write_experiment,
)
from fullstride.errors import ConfigError

MACHINE = {"cpu": "AMD EPYC", "cores": 2, "gpu": {"name": "NVIDIA H200"}}


def _result(values: dict[int, float], **changes) -> ExperimentResult:
    row = Outcome({"training": "ratio 0.25"}, {"energy distance": values, "nothing": {}}, ["epochs=3"])
    part = PartResult("p", "A part", "Why?", [row, Outcome({"training": "floor"}, {"energy distance": {0: 1.0}})])
    given = {"scale": "cpu", "device": "cpu", "conditions": {}, "parts": [part], "environment": MACHINE}
    return ExperimentResult("made", "Made", "About.", **{**given, **changes})


def test_mean_and_spread_are_those_of_numpy():
    x = np.random.default_rng().normal(size=5).tolist()
    assert mean(x) == pytest.approx(np.mean(x))
    assert spread(x) == pytest.approx(np.std(x, ddof=1))
    assert spread(x[:1]) is None


def test_a_result_keeps_every_seed_beside_mean_and_spread(tmp_path):
    values = {seed: float(x) for seed, x in enumerate(np.random.default_rng().uniform(1, 9, 3))}
    path = write_experiment(_result(values), tmp_path)
    assert path.name == "experiment-made--cpu--amd-epyc-2-cores.json"
    found = check_experiment(json.loads(path.read_text()), path)
    metrics = found["parts"][0]["rows"][0]["metrics"]
    assert list(metrics) == ["energy distance"]
    assert metrics["energy distance"]["seeds"] == {str(seed): x for seed, x in values.items()}
    assert metrics["energy distance"]["mean"] == pytest.approx(np.mean(list(values.values())))
    assert metrics["energy distance"]["spread"] == pytest.approx(np.std(list(values.values()), ddof=1))


def test_a_number_that_is_none_leaves_the_older_file(tmp_path):
    path = write_experiment(_result({0: 1.0, 1: 2.0}), tmp_path)
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_experiment(_result({0: float("nan")}), tmp_path)
    assert path.read_text() == before


@pytest.mark.parametrize(("change", "why"), [({"format": 9}, "format 9"), ({"parts": None}, "parts missing")])
def test_other_formats_and_halves_are_named(tmp_path, change, why):
    data = _result({0: 1.0}).to_dict() | change
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}: {why}"):
        check_experiment(data, tmp_path)


def test_tables_show_the_mean_of_all_seeds_and_the_claims():
    claims = [Claim("a", "b", None), Claim("c", "d", False)]
    part, judged = tables(_result({0: 1.0, 1: 2.0, 2: 6.0}, claims=claims))
    assert list(part.columns[1].cells) == ["3.0 ±2.6", "1"]
    assert "Mean ± standard deviation, seeds 0, 1 and 2." in str(part.caption)
    (single,) = tables(_result({4: 1.0}))
    assert str(single.caption) == "Why? One run each, seed 4."
    assert list(judged.columns[2].cells) == ["not judged", "no"]


def test_no_spread_where_there_is_none():
    assert mean_and_spread([2.0, 2.0]) == mean_and_spread([2.0]) == "2"
