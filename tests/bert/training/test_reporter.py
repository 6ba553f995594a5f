import re

import numpy as np
import optax
import pytest

from fullstride.bert.training.reporter import Reporter
from fullstride.runs.folder import read_metrics
from fullstride.step.jax import Metrics, TrainStep
from tests.bert.runs import QUIET, settings

WINDOW = 3


def _told(folder, skipped: list[bool]) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Lines of steps of which some were skipped, for a loss that is not finite there, and what was given."""
    random = np.random.default_rng(0)
    given = {name: random.uniform(1, 9, len(skipped)) for name in ("loss", "accuracy", "grad_norm")}
    given["loss"][skipped] = np.nan
    given["grad_norm"][skipped] = np.inf
    asked = settings(folder / "texts", folder, f"log_every={WINDOW}", f"steps={len(skipped)}", "track=prometheus")
    step = TrainStep(lambda model, batch, key: model.sum(), optax.sgd(0.1), np.ones(2, "f"))
    with Reporter(asked, folder, step, 0, QUIET) as reporter:
        for i, skip in enumerate(skipped):
            reporter.late(Metrics(i + 1, {name: values[i] for name, values in given.items()} | {"skipped": skip}))
    return list(read_metrics(folder)), given


@pytest.mark.parametrize("name", ["loss", "accuracy", "grad_norm"])
def test_a_line_is_the_mean_of_its_steps_that_were_not_skipped(tmp_path, name):
    lines, given = _told(tmp_path, [True, False, False, False, False, True, False, False, False])
    assert [line["step"] for line in lines] == [3, 6, 9]
    assert [line["skipped_steps"] for line in lines] == [1, 1, 0]
    values = given[name]
    expected = [(values[1] + values[2]) / 2, (values[3] + values[4]) / 2, values[6:].sum() / 3]
    assert [line[name] for line in lines] == pytest.approx(expected)
    tracked = (tmp_path / "prometheus" / "train.prom").read_text()
    values = {float(value) for value in re.findall(r"^fullstride_train_loss{.*} (.*)$", tracked, re.MULTILINE)}
    assert values == {lines[-1]["loss"]}
    assert re.search(r'state="finished"} 1.0$', tracked, re.MULTILINE)


def test_a_line_whose_steps_were_all_skipped_says_what_they_measured(tmp_path):
    (line,), given = _told(tmp_path, [True] * WINDOW)
    assert line["skipped_steps"] == WINDOW
    assert line["accuracy"] == pytest.approx(given["accuracy"].mean())
    assert line["loss"] is None
    assert line["grad_norm"] is None
