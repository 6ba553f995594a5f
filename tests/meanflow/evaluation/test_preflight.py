import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import DataConfig, EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.evaluation import preflight as evaluable
from fullstride.meanflow.evaluation.preflight import can_classify, check_evaluation, feature_names
from tests.meanflow.metrics.test_inception import FakeExtractor


@pytest.fixture(scope="module")
def data():
    return load_data(DataConfig())


@pytest.mark.parametrize(
    "change", [{"num_classes": 0}, {"num_classes": 1}, {"image_shape": (1, 7, 7)}, {"pixels": False}]
)
def test_a_classifier_needs_several_classes_of_pictures_that_its_network_can_see(data, change):
    assert can_classify(data)
    assert feature_names(data, EvalConfig()) == ["classifier"]
    other = dataclasses.replace(data, **change)
    assert not can_classify(other)
    assert feature_names(other, EvalConfig()) == []
    check_evaluation(other, EvalConfig())
    with pytest.raises(ConfigError, match=r"evaluation.features=\[classifier\]: needs (labelled )?pictures"):
        check_evaluation(other, EvalConfig(features=["classifier"]), due=False)


def test_inceptions_weights_are_asked_for_whether_or_not_the_run_evaluates(data, tmp_path, monkeypatch):
    fake = SimpleNamespace(FeatureExtractorInceptionV3=FakeExtractor)
    monkeypatch.setitem(sys.modules, "torch_fidelity", fake)
    torch.save({"mix": torch.zeros(3, 2048)}, tmp_path / "w.pth")
    for due in (True, False):
        check_evaluation(data, EvalConfig(features=["inception"], inception_weights=str(tmp_path / "w.pth")), due=due)
        with pytest.raises(ConfigError, match=r"none.pth: no such file"):
            check_evaluation(data, EvalConfig(features=["inception"], inception_weights="none.pth"), due=due)
        with pytest.raises(ConfigError, match=r"evaluation.inception_weights=FILE when"):
            check_evaluation(data, EvalConfig(features=["inception"]), due=due)


def test_what_has_to_be_fetched_is_fetched_only_by_a_run_that_evaluates(data, monkeypatch):
    asked = []
    monkeypatch.setattr(evaluable, "fetch", asked.append)
    check_evaluation(data, EvalConfig(features=["efficientnet_lite0"]), due=False)
    assert asked == []
    check_evaluation(data, EvalConfig(features=["efficientnet_lite0"]))
    assert asked == ["efficientnet-lite0"]


def test_an_unknown_name_is_told_from_a_known_one(data):
    with pytest.raises(ConfigError, match=r"evaluation.features=incepton: .*; did you mean inception\?"):
        check_evaluation(data, EvalConfig(features=["incepton"]))


def test_too_few_held_out_records_are_no_distribution(data):
    three = dataclasses.replace(data, test=Split(data.test.records[:3], data.test.labels[:3]))
    with pytest.raises(ConfigError, match="3 held-out and 898 training records, but an evaluation needs at least 4 "):
        check_evaluation(three, EvalConfig())
    check_evaluation(three, EvalConfig(), due=False)
