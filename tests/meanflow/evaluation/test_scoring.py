import io
import re

import pytest
import torch
from rich.console import Console

from fullstride.meanflow.config.networks import UNetConfig
from fullstride.meanflow.config.schema import DataConfig, EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.evaluation import scoring
from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.evaluation.scoring import ScoringProgress, evaluations, score_samplers
from fullstride.meanflow.sampling.samplers import EVALUATIONS, sample
from fullstride.meanflow.training.build import build_model

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


def test_a_sampler_that_takes_long_is_heard_of_where_there_is_no_terminal(model, evaluator, monkeypatch, capsys):
    monkeypatch.setattr(scoring, "LINE_EVERY", -1.0)
    score_samplers(evaluator, model, [("meanflow", 1), ("euler", 2)], 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("evaluations made")]
    assert lines[-1] == "2 of 2, euler 2: 2 of 2 evaluations made"
    assert len(lines) == 3 * (1 + 2)  # three batches


@pytest.mark.parametrize("width", [40, 80])
def test_the_bar_counts_evaluations_on_a_terminal_of_any_width(model, evaluator, width):
    screen = io.StringIO()
    progress = ScoringProgress(ROWS, 13, Console(file=screen, force_terminal=True, width=width))
    shares = []
    with progress.watching(model):
        for place, row in enumerate(ROWS):
            progress.begin(place)
            score = evaluator.sampler_score(model, *row, 0)
            shares.append(progress.bar.tasks[0].percentage)
            progress.scored(score)
    assert shares == pytest.approx([100 * done / 13 for done in (3, 11, 13)])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    last = [line.rstrip() for line in lines if line.strip()][-1]
    assert last.startswith("3/3 heun 1 ")
    assert "100%" in last
    assert max(map(len, lines)) <= width


def test_an_error_leaves_no_hook(model):
    progress = ScoringProgress(ROWS, 2)
    with pytest.raises(ZeroDivisionError), progress.watching(model):
        _ = 1 / 0
    assert not model._forward_hooks
