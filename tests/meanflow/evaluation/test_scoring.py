import pytest
import torch

from fullstride.meanflow.config.networks import UNetConfig
from fullstride.meanflow.config.schema import DataConfig, EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation.evaluator import Evaluator, evaluations, score_samplers
from fullstride.meanflow.sampling.samplers import EVALUATIONS, sample
from fullstride.meanflow.training.build import build_model
from fullstride.process import progress

ROWS = [("meanflow", 3), ("rk4", 2), ("heun", 1)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(UNetConfig(channels=4, channel_mult=[1], num_blocks=1, attention_resolutions=[]), (1, 8, 8), 0)


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(load_data(DataConfig()), EvalConfig(num_samples=13, batch_size=5), torch.device("cpu"))


@pytest.mark.parametrize("sampler", EVALUATIONS)
@pytest.mark.parametrize("steps", [1, 3])
def test_as_many_evaluations_are_expected_as_are_made(model, sampler, steps):
    made = sample(model, sampler=sampler, steps=steps, num=2, shape=(1, 8, 8), seed=0)
    assert made.nfe == evaluations(sampler, steps)


def test_scores_are_those_without_progress_and_the_network_is_left_as_it_was(model, evaluator, capsys):
    kept: list[torch.Tensor] = []
    scores = score_samplers(evaluator, model, ROWS, 0, kept.append)
    alone = [evaluator.sampler_score(model, *row, 0) for row in ROWS]
    assert [score.score for score in scores] == [score.score for score in alone]
    assert [len(images) for images in kept] == [13] * 3
    assert not model._forward_hooks
    assert [line.rpartition(", ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "1 of 3, meanflow 3: 13 samples of 3 evaluations each",
        "2 of 3, rk4 2: 13 samples of 8 evaluations each",
        "3 of 3, heun 1: 13 samples of 2 evaluations each",
    ]


def test_samplers_that_take_long_are_heard_of_where_there_is_no_terminal(model, evaluator, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", -1.0)
    score_samplers(evaluator, model, [("meanflow", 1), ("euler", 2)], 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("scoring: ")]
    done = [int(line.removeprefix("scoring: ").partition("/39")[0]) for line in lines]
    # Three batches of each evaluation, each sampler's end, and the end of all.
    assert done == [5, 10, 13, 13, 18, 23, 28, 33, 36, 39, 39, 39]
    assert lines[0].endswith(", 1/2 meanflow 1")
    assert lines[-1].endswith(", 2/2 euler 2")


def test_an_error_leaves_no_hook(model, evaluator, monkeypatch):
    monkeypatch.setattr(evaluator, "sampler_score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_samplers(evaluator, model, ROWS, 0)
    assert not model._forward_hooks
