"""Tables about language models: each cell is the file's number, and what lacks is an error."""

import statistics
from pathlib import Path

import pytest

from benchmarks.harness.seeds import Outcome
from benchmarks.report.doc_tables import language
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import RANDOM, ms, row, write_parts, write_rows
from tests.benchmarks.report.markup import as_number, cells_of

MODELS, CALLED = ("tiny", "base"), ("bare executable", "filter_jit", "TrainStep")
Made = dict[str, dict[str, list[Outcome]]]
TIMES = ("step ms", "step ms, each waited for", "over the bare executable")


def _outcome(labels: dict[str, str], names: tuple[str, ...]) -> Outcome:
    """A row with values of two seeds under each name."""
    return Outcome(labels, {name: {seed: ms() for seed in (0, 1)} for name in names})


def _mean(row: Outcome, name: str) -> float:
    return statistics.mean(row.values[name].values())


def _bert(path: Path, lacking: str = "", times: tuple[str, ...] = TIMES) -> tuple[Folder, Made]:
    """BERT's experiment at both scales, and the rows of each part by scale."""
    learned = tuple(name for name in language.LEARNED if name != lacking)
    made = {}
    for scale in ("cpu", "gpu"):
        made[scale] = {
            "learned": [_outcome({"model": model}, learned) for model in MODELS],
            "overhead": [_outcome({"model": model, "way": way}, times) for model in MODELS for way in CALLED],
        }
        write_parts(path, "bert", made[scale], scale)
    return read_folder(path), made


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_what_each_model_has_learned_is_that_of_its_scale(tmp_path, scale):
    folder, made = _bert(tmp_path)
    table = language.bert(scale, folder)
    assert cells_of(table, "model") == list(language.LEARNED)
    for of in made[scale]["learned"]:
        expected = [form.format(_mean(of, name)) for name, form in language.LEARNED.items()]
        assert cells_of(table, of.labels["model"]) == expected


def test_a_model_whose_run_has_not_ended_is_an_error(tmp_path):
    folder, _ = _bert(tmp_path, lacking="accuracy")
    with pytest.raises(ConfigError, match="tiny has no accuracy; let its run come to an end"):
        language.bert("gpu", folder)


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_steps_stand_by_model_and_by_the_way_they_are_called(tmp_path, scale):
    folder, made = _bert(tmp_path)
    table = language.bert_steps(scale, folder)
    for of in made[scale]["overhead"]:
        loop, waited, over = cells_of(table, f"{of.labels['model']} | {of.labels['way']}")
        assert as_number(loop) == pytest.approx(_mean(of, "step ms"), rel=1e-3)
        assert as_number(waited) == pytest.approx(_mean(of, "step ms, each waited for"), rel=1e-3)
        assert float(over) == pytest.approx(_mean(of, "over the bare executable"), abs=6e-4)


def test_steps_stand_beside_the_floor_where_it_was_measured(tmp_path):
    folder, made = _bert(tmp_path, times=(*TIMES, "over the floor"))
    table = language.bert_steps("gpu", folder)
    assert table.header[-1] == "x the bound"
    for of in made["gpu"]["overhead"]:
        *_, beside = cells_of(table, f"{of.labels['model']} | {of.labels['way']}")
        assert float(beside) == pytest.approx(_mean(of, "over the floor"), abs=6e-3)


def _waiting(name, **attack):
    times = {kind: {key: ms() for key in ("count", "median", "p99", "max")} for kind in ("request_ms", "health_ms")}
    return row(name, **times, **attack)


def test_small_requests_stand_beside_what_the_server_gets_meanwhile(tmp_path):
    rate, cut_off = RANDOM.uniform(0.1, 90), RANDOM.randrange(1, 9)
    attacked = _waiting("a header", attack_answers={"431": 1234, "cut off": cut_off}, attacks_per_second=rate)
    rows = [_waiting("idle"), attacked]
    of = {"device": "cpu", "model": "smollm2", "precision": "float32"}
    table = language.hostile(write_rows(tmp_path, "llm-hostile", rows, **of))
    for each in rows:
        *numbers, per_second, answers = cells_of(table, each.name)
        waits = [each.extra[kind][key] for kind in ("request_ms", "health_ms") for key in ("median", "p99", "max")]
        assert [as_number(cell) for cell in numbers] == pytest.approx(waits, rel=1e-3)
        assert (per_second == answers == "") is (each is not attacked)
    *_, per_second, answers = cells_of(table, "a header")
    assert as_number(per_second) == pytest.approx(rate, rel=6e-3)
    assert answers == f"1,234 x 431, {cut_off} x cut off"


def test_clients_of_the_server_stand_beside_the_engine_alone(tmp_path):
    rows = [
        row(
            f"{count} at once",
            batch=count,
            first_token_ms={"median": ms(), "p90": ms(), "p99": ms()},
            tokens_per_second=ms(),
            engine_tokens_per_second=ms(),
            share_of_the_engine=RANDOM.uniform(0.1, 1),
        )
        for count in (1, 4, 16)
    ]
    table = language.serve(write_rows(tmp_path, "llm-serve", rows, device="cpu", model="smollm2", precision="float32"))
    for of in rows:
        *numbers, share = cells_of(table, str(of.extra["batch"]))
        first = of.extra["first_token_ms"]
        times = [first["median"], first["p99"], of.timing.median_ms]
        speeds = [of.extra["tokens_per_second"], of.extra["engine_tokens_per_second"]]
        assert [as_number(cell) for cell in numbers] == pytest.approx([*times, *speeds], rel=1e-3)
        assert share == f"{100 * of.extra['share_of_the_engine']:.0f} %"
