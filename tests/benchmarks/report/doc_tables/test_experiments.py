"""Tables about experiments: each cell is the file's mean and spread, bold what is best by more than it varies."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.experiments.meanflow.race_claims import WITHIN
from benchmarks.harness.seeds import Outcome
from benchmarks.report.doc_tables import experiments, race
from benchmarks.report.doc_tables.one_step import CLAIMED, one_step
from benchmarks.report.doc_tables.over_seeds import clearly_lowest, compared, mean_and_spread, sampler_in_words
from benchmarks.report.doc_tables.tables import tables
from benchmarks.report.markdown import filled
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import RANDOM, write_parts
from tests.benchmarks.report.markup import cells_of

SEEDS = (0, 1, 2)
FLOOR = "floor: as many training images"
Values = dict[int, float]


def _values(low: float = 0.01, high: float = 0.9, seeds: tuple[int, ...] = SEEDS) -> Values:
    return {seed: RANDOM.uniform(low, high) for seed in seeds}


def _metric(*values: float) -> dict:
    return Outcome({}, {"x": dict(enumerate(values))}).to_dict()["metrics"]["x"]


def _told(values: Values, form: str = ".4f", factor: float = 1.0) -> str:
    found = [factor * value for value in values.values()]
    return f"{statistics.mean(found):{form}} ± {statistics.stdev(found):{form}}"


def _arm(training: str, seeds: tuple[int, ...] = SEEDS) -> list[Outcome]:
    rows = []
    for sampler in ("meanflow 1", "meanflow 2", "euler 16"):
        values = {"energy distance": _values(seeds=seeds), "FD-classifier": _values(5, 90, seeds)}
        values["labels right"] = _values(0.5, 1, seeds)
        if sampler == "meanflow 1":
            values["final squared error"] = _values(seeds=seeds)
        rows.append(Outcome({"training": training, "sampler": sampler}, values, ["a=b"]))
    return rows


def _floor(**values: float) -> Outcome:
    floor = {"energy distance": 0.0123, "FD-classifier": -0.0, "labels right": 0.987}
    return Outcome({"training": FLOOR, "sampler": ""}, {name: {0: value} for name, value in (floor | values).items()})


def test_the_lowest_is_bold_only_if_the_next_is_farther_than_the_larger_spread():
    low, spread = RANDOM.uniform(1, 2), RANDOM.uniform(0.1, 0.2)
    best = _metric(low - spread / 4, low, low + spread / 4)
    # Nearer than its own spread of 0.9, farther than the best one's of 0.25.
    near = _metric(low - 0.1 * spread, low + 0.8 * spread, low + 1.7 * spread)
    far = _metric(low + 0.1 * spread, low + 1.1 * spread, low + 2.1 * spread)
    assert clearly_lowest([near, best]) is None
    assert clearly_lowest([far, None, best]) == 2
    assert compared([far, best]) == [mean_and_spread(far), f"**{mean_and_spread(best)}**"]
    assert clearly_lowest([best, None]) is None
    # A single seed has no spread, so that nothing can be said of how far away it is.
    assert clearly_lowest([far, _metric(0.0)]) is None
    assert clearly_lowest([]) is None


def test_a_single_value_has_no_spread_and_a_zero_no_sign():
    assert mean_and_spread(_metric(-0.0), ".1f") == "0.0"
    assert mean_and_spread(_metric(0.5, 0.7), ".1f", 100.0) == "60.0 ± 14.1"
    names = ("meanflow 1", "meanflow 2", "meanflow 4", "euler 50", "dopri5")
    words = ["one step", "two steps", "4 steps", "50 Euler steps", "dopri5"]
    assert [sampler_in_words(name) for name in names] == words


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_trainings_have_their_means_and_spreads_at_every_scale(tmp_path, scale):
    rows = [*_arm("ratio 0"), *_arm("ratio 0.5"), *_arm("ratio 1", (0, 2))]
    parts = {"ratio": [*rows, _floor()]}
    table = experiments.trainings(
        scale, "phase4", "ratio", write_parts(tmp_path, "phase4", parts, scale, seeds=list(SEEDS))
    )
    for training, name in (("ratio 0", "ratio 0"), ("ratio 0.5", "ratio 0.5"), ("ratio 1", "ratio 1 (seeds 0 and 2)")):
        one, two, euler = (row.values for row in rows if row.labels["training"] == training)
        expected = [_told(values["energy distance"]) for values in (one, two, euler)]
        expected += [_told(values["FD-classifier"], ".1f") for values in (one, two, euler)]
        found = cells_of(table, name)
        assert [cell.strip("*") for cell in found] == [*expected, _told(one["labels right"], ".1f", 100)]
        assert "**" not in found[-1]
    assert cells_of(table, f"*{FLOOR}*") == [*["0.0123"] * 3, *["0.0"] * 3, "98.7"]


def test_a_cell_of_other_seeds_names_them_and_one_without_a_score_is_empty(tmp_path):
    rows = [*_arm("ratio 0"), *_arm("ratio 0.5")[:2], _floor()]
    for metric in rows[2].values.values():
        del metric[1]
    table = experiments.trainings(
        "gpu", "phase4", "ratio", write_parts(tmp_path, "phase4", {"ratio": rows}, seeds=list(SEEDS))
    )
    two, partial, other = (
        rows[1].values["energy distance"],
        rows[2].values["energy distance"],
        cells_of(table, "ratio 0.5"),
    )
    assert [cell.strip("*") for cell in cells_of(table, "ratio 0")[1:3]] == [
        _told(two), f"{_told(partial)} (seeds 0 and 2)"
    ]  # fmt: skip
    assert other[2] == other[5] == ""
    assert all(other[i] for i in (0, 1, 3, 4, 6))
    solvers = {
        "euler 1": _sampled("euler 1", dict.fromkeys(SEEDS, 1.0), _values()),
        "meanflow 1": _sampled("meanflow 1", {2: 1.0}, {2: 0.25}),
    }
    folder = write_parts(tmp_path, "phase3", {"solvers": [*solvers.values(), _floor()]}, "cpu", seeds=list(SEEDS))
    assert cells_of(experiments.solvers("cpu", folder), "1")[0] == "0.2500 (seed 2)"


def test_a_column_has_its_best_in_bold_and_the_floor_takes_no_part(tmp_path):
    good, bad = _arm("good"), _arm("bad")
    good[0].values["energy distance"] = {0: 0.10, 1: 0.11, 2: 0.12}
    bad[0].values["energy distance"] = {0: 0.20, 1: 0.21, 2: 0.22}
    bad[0].values["final squared error"] = {0: 0.0, 1: 0.1, 2: 0.2}
    good[0].values["final squared error"] = {0: 1.0, 1: 1.1, 2: 1.2}
    folder = write_parts(tmp_path, "phase2", {"overfit": [*bad, *good, _floor()]}, seeds=list(SEEDS))
    table = experiments.trainings("gpu", "phase2", "overfit", folder)
    assert cells_of(table, "good")[0] == "**0.1100 ± 0.0100**"
    assert cells_of(table, "bad")[0] == "0.2100 ± 0.0100"
    # Squared errors are of different targets.
    assert cells_of(table, "bad")[3] == "0.1000 ± 0.1000"
    assert cells_of(table, f"*{FLOOR}*") == ["0.0123", "0.0123", "0.0", ""]


def _sampled(sampler: str, nfe: Values, energy: Values) -> Outcome:
    return Outcome({"training": "one", "sampler": sampler}, {"NFE": nfe, "energy distance": energy}, ["a=b"])


def test_solvers_stand_by_their_evaluations_and_the_best_of_a_row_is_bold(tmp_path):
    rows = {
        "dopri5": _sampled("dopri5", {0: 60.0, 1: 70.0, 2: 80.0}, _values()),
        "euler 2": _sampled("euler 2", dict.fromkeys(SEEDS, 2.0), {0: 0.50, 1: 0.51, 2: 0.52}),
        "heun 1": _sampled("heun 1", dict.fromkeys(SEEDS, 2.0), _values(2, 3)),
        "meanflow 2": _sampled("meanflow 2", dict.fromkeys(SEEDS, 2.0), {0: 0.10, 1: 0.11, 2: 0.12}),
        "euler 1": _sampled("euler 1", dict.fromkeys(SEEDS, 1.0), _values()),
    }
    told = {name: _told(row.values["energy distance"]) for name, row in rows.items()}
    folder = write_parts(tmp_path, "phase3", {"solvers": [*rows.values(), _floor()]}, "cpu", seeds=list(SEEDS))
    table = experiments.solvers("cpu", folder)
    assert table.header == ("network evaluations", "MeanFlow", "Euler", "Heun", "dopri5")
    assert [cells[0] for cells, _ in table.rows] == ["1", "2", "70 ± 10", f"*{FLOOR}*"]
    assert cells_of(table, "1") == ["", told["euler 1"], "", ""]
    assert cells_of(table, "2") == ["**0.1100 ± 0.0100**", told["euler 2"], told["heun 1"], ""]
    assert cells_of(table, "70 ± 10")[-1] == told["dopri5"]
    assert cells_of(table, f"*{FLOOR}*") == ["0.0123"] * 4


def test_an_experiment_a_part_or_a_row_that_is_not_there_is_an_error(tmp_path):
    parts = {"ratio": _arm("ratio 0")[:2], "times": [], "power": _arm("power 0")}
    del parts["power"][0].values["labels right"]
    folder = write_parts(tmp_path, "phase4", parts, seeds=list(SEEDS))
    with pytest.raises(ConfigError, match=r"no file experiment-phase4--cpu--\*.json"):
        experiments.trainings("cpu", "phase4", "ratio", folder)
    with pytest.raises(ConfigError, match="no part 'overfit'; expected one of ratio, times, power"):
        experiments.trainings("gpu", "phase4", "overfit", folder)
    with pytest.raises(ConfigError, match="nothing of 'times' has been run"):
        experiments.trainings("gpu", "phase4", "times", folder)
    with pytest.raises(ConfigError, match="no energy distance of euler 16; run the experiment again"):
        experiments.trainings("gpu", "phase4", "ratio", folder)
    with pytest.raises(ConfigError, match="no labels right of meanflow 1; run"):
        experiments.trainings("gpu", "phase4", "power", folder)


def _mark(code: str, mark: str, seconds: float, start: Values, **distances: Values) -> Outcome:
    clocks = {"seconds of training": dict.fromkeys(start, seconds)}
    clocks["seconds with start-up"] = {seed: seconds + value for seed, value in start.items()}
    values = clocks | {"steps": dict.fromkeys(start, 10 * seconds)} | {"energy distance": _values(seeds=tuple(start))}
    return Outcome({"code": code, "mark": mark}, values | distances, [code])


def _race(path: Path, **distances: Values) -> tuple[Folder, dict[str, Values], list[Outcome], list[Outcome]]:
    start = {code: _values(50, 150) for code in race.CODES}
    marks = [_mark(code, str(i), 60.0 * i, start[code], **distances) for code in start for i in (10, 2)]
    marks.append(_mark("official", "40% of the time with start-up", 33.0, start["official"], **distances))
    named = [("official", "meanflow 1"), ("fullstride", "meanflow 1"), ("fullstride", "euler 50")]
    ends = [Outcome({"code": c, "sampler": s}, {"energy distance": _values()} | distances, [c]) for c, s in named]
    floor = {"energy distance": {0: 0.0071}} | {name: {0: 3.14} for name in distances}
    ends.append(Outcome({"code": FLOOR, "sampler": ""}, floor))
    return write_parts(path, "time-to-quality", {"by-minute": marks, "end": ends}), start, marks, ends


@pytest.mark.parametrize(("metric", "form"), race.FORMS.items())
def test_the_race_has_both_codes_side_by_side_by_time(metric, form, tmp_path):
    folder, _, marks, _ = _race(tmp_path, **{"FD-classifier": _values(20, 90)})
    table = race.race(metric, "gpu", folder)
    assert table.header == ("minutes of training", *race.CODES)
    assert [cells[0] for cells, _ in table.rows] == ["2.0", "10.0"]
    for mark, minutes in (("2", "2.0"), ("10", "10.0")):
        rows = {row.labels["code"]: row.values for row in marks if row.labels["mark"] == mark}
        found = cells_of(table, minutes)
        assert [cell.strip("*") for cell in found] == [_told(rows[code][metric], form) for code in race.CODES]
        assert metric != "FD-classifier" or "**" not in "".join(found)  # both codes were given the same


def test_the_end_of_the_race_has_start_up_and_the_solver_and_no_distance_that_is_not_shared(tmp_path):
    folder, start, _, ends = _race(tmp_path)
    table = race.end("gpu", folder)
    assert "FD" not in str(table)
    one, ours, euler = (_told(row.values["energy distance"], ".3f") for row in ends[:3])
    official, own = (cells_of(table, f"{code} (seeds 0, 1 and 2)") for code in ("official", "fullstride"))
    assert [cell.strip("*") for cell in official] == [_told(start["official"], ".0f"), "6,000", one, ""]
    assert [cell.strip("*") for cell in own] == [_told(start["fullstride"], ".0f"), "6,000", ours, euler]
    assert "**" not in own[3]  # there is nothing beside the solver
    assert cells_of(table, f"*{FLOOR}*") == ["", "", "0.007", "0.007"]
    with pytest.raises(ConfigError, match="no FD-classifier, as the runs share no classifier"):
        race.race("FD-classifier", "gpu", folder)


def test_where_the_rate_falls_each_training_has_its_own_time_beside_it(tmp_path):
    start = {code: _values(50, 150) for code in (*race.CODES, "fullstride-short")}
    seconds = {"official": 600.0, "fullstride": 600.0, "fullstride-short": 240.0}
    marks = [_mark(code, str(i), seconds[code] * i / 10, start[code]) for code in start for i in (1, 10)]
    ends = {code: _values() for code in start}
    rows = [Outcome({"code": c, "sampler": "meanflow 1"}, {"energy distance": of}, [c]) for c, of in ends.items()]
    rows.append(Outcome({"code": FLOOR, "sampler": ""}, {"energy distance": {0: 0.0071}}))
    folder = write_parts(tmp_path, "time-to-quality-annealed", {"by-minute": marks, "end": rows})
    table = race.falling("gpu", folder)
    for code, of in ends.items():
        cells = cells_of(table, f"{code} (seeds 0, 1 and 2)")
        told = [_told(start[code], ".0f"), f"{seconds[code]:.0f}", f"{10 * seconds[code]:,.0f}", _told(of, ".3f")]
        assert [cell.strip("*") for cell in cells] == told
    assert cells_of(table, f"*{FLOOR}*") == ["", "", "", "0.007"]
    with pytest.raises(ConfigError, match="experiment-time-to-quality--gpu"):
        race.end("gpu", folder)  # which are other trainings
    ours = {"by-minute": marks[2:], "end": rows[1:]}
    alone = race.falling("gpu", write_parts(tmp_path / "alone", "time-to-quality-annealed", ours))
    assert [cells[0].partition(" ")[0] for cells, _ in alone.rows] == ["fullstride", "fullstride-short", "*floor:"]


def test_another_objective_stands_beside_the_codes_where_it_ran(tmp_path):
    start = {code: _values(50, 150) for code in (*race.CODES, "fullstride-imf")}
    found = {code: _values() for code in start}
    marks = [_mark(code, "10", 600.0, start[code], **{"energy distance": of}) for code, of in found.items()]
    ends = [Outcome({"code": c, "sampler": "meanflow 1"}, {"energy distance": of}, [c]) for c, of in found.items()]
    folder = write_parts(tmp_path, "time-to-quality", {"by-minute": marks, "end": ends})
    ((_, *cells),) = (row for row, _ in race.race("energy distance", "gpu", folder).rows)
    assert [cell.strip("*") for cell in cells] == [_told(of, ".3f") for of in found.values()]
    named = [f"{code} (seeds 0, 1 and 2)" for code in found]
    table = race.end("gpu", folder)
    assert [cells_of(table, name)[2].strip("*") for name in named] == [_told(of, ".3f") for of in found.values()]


def test_means_of_fewer_seeds_name_them_and_what_is_missing_is_told(tmp_path):
    start = {code: _values(50, 150) for code in race.CODES}
    few = {0: start["official"][0], 2: start["official"][2]}
    marks = [_mark(code, str(i), 60.0 * i, start[code]) for code in start for i in (1, 2)]
    marks += [_mark("official", "3", 180.0, few), _mark("fullstride", "3", 180.0, start["fullstride"])]
    end = Outcome({"code": "official", "sampler": "meanflow 1"}, {"energy distance": _values(seeds=(0, 2))}, ["-"])
    parts = {"by-minute": marks, "end": [end]}
    folder = write_parts(tmp_path, "time-to-quality", parts, missing=["official, seed 1: 2 of 10 marks"])
    told = "Means and standard deviations: official over seeds {}; fullstride over seeds 0, 1 and 2. "
    for table, seeds in (
        (race.race("energy distance", "gpu", folder), "0, 1 and 2"),
        (race.end("gpu", folder), "0 and 2"),
    ):
        assert table.note == told.format(seeds) + "Not run: official, seed 1: 2 of 10 marks."
        assert f"|\n\n{table.note}\n\nSources" in str(table)
    assert [cells[0] for cells, _ in race.race("energy distance", "gpu", folder).rows] == [
        "1.0",
        "2.0",
        "3.0 (official: seeds 0 and 2)",
    ]
    # The start-up is of the same seeds as the distances beside it.
    assert cells_of(race.end("gpu", folder), "official (seeds 0 and 2)")[0] == _told(few, ".0f")


def test_the_official_quality_is_reached_when_every_distance_is_by_the_clock_that_is_asked(tmp_path):
    start = {"official": {0: 150.0, 1: 170.0}, "fullstride": {0: 50.0, 1: 70.0}}
    # The official code is at 0.2 and 30 after 600 s of training, and with its start-up at 0.3 and 40 after 595 s.
    distances = {"official": {435: (0.3, 40.0), 602: (0.2, 30.0)}, "fullstride": {60: (0.2, 41.0), 120: (0.3, 39.0)}}
    distances["fullstride"] |= {180: (0.19, 31.0), 240: (0.21, 29.0), 300: (0.2, 30.0), 360: (0.1, 20.0)}
    marks = []
    for code, at in distances.items():
        for seconds, (energy, frechet) in at.items():
            found = {"FD-classifier": {0: frechet, 1: frechet}, "energy distance": {0: energy - 0.01, 1: energy + 0.01}}
            marks.append(_mark(code, str(len(marks)), float(seconds), start[code], **found))
    folder = write_parts(tmp_path, "time-to-quality", {"by-minute": marks}, minutes=10.0)
    (source,) = folder.experiments
    assert race.reached(source, race.TRAINING) == (300, 2)
    assert race.reached(source, race.WITH_START) == (120 + 60, 2)
    for mark in marks:
        if mark.labels["code"] == "official":
            mark.values.update({name: {0: of[0]} for name, of in mark.values.items()})
    (source,) = write_parts(tmp_path, "time-to-quality", {"by-minute": marks}, minutes=10.0).experiments
    assert race.reached(source, race.TRAINING)[1] == 1
    for mark in marks:
        if mark.labels["code"] == "fullstride":
            mark.values["FD-classifier"] = {0: 30.1, 1: 30.1}
    (source,) = write_parts(tmp_path, "time-to-quality", {"by-minute": marks}, minutes=10.0).experiments
    with pytest.raises(ConfigError, match="did not reach the official code's quality"):
        race.reached(source, race.TRAINING)


def test_one_seed_has_no_mean(tmp_path):
    marks = [_mark(code, "10", 600.0, {2: 50.0}) for code in race.CODES]
    end = Outcome({"code": "official", "sampler": "meanflow 1"}, {"energy distance": {2: 0.1}}, ["-"])
    folder = write_parts(tmp_path, "time-to-quality", {"by-minute": marks, "end": [end]})
    for table in (race.race("energy distance", "gpu", folder), race.end("gpu", folder)):
        assert table.note == "One run of each: official seed 2; fullstride seed 2."
    folder = write_parts(tmp_path, "phase4", {"power": [*_arm("power 1", (2,)), _floor()]}, seeds=[0, 2])
    assert experiments.trainings("gpu", "phase4", "power", folder).note == "One run each, seed 2."


def test_each_machine_may_have_a_table_and_the_newest_stands_where_none_is_named(tmp_path):
    for gpu, date, distance in (("H200", "2031-01-01", 0.111), ("H100 80GB HBM3", "2030-01-01", 0.222)):
        marks = [_mark(code, "1", 60.0, _values(50, 150)) for code in race.CODES]
        for mark in marks:
            mark.values["energy distance"] = {0: distance}
        write_parts(
            tmp_path,
            "time-to-quality",
            {"by-minute": marks, "end": []},
            environment={"gpu": {"name": f"NVIDIA {gpu}"}, "date": date},
        )
    made, page = tables(tmp_path), "<!-- table: race-energy-gpu{} -->\n<!-- end of table -->"
    assert "0.111" in filled(page.format(""), made, "p")
    assert "0.222" in (found := filled(page.format(" of nvidia-h100-80gb-hbm3"), made, "p"))
    assert filled(found, made, "p") == found
    with pytest.raises(ConfigError, match=r"no file experiment-time-to-quality--gpu--\*.json among the results"):
        filled(page.format(" of nvidia-b200"), made, "p")


def _scored(label: str, training: str, sampler: str, seeds: Values, energies: Values) -> Outcome:
    return Outcome({label: training, "sampler": sampler}, {"FD-classifier": seeds, "energy distance": energies})


def _beside_solver(folder: Path, half: list[Outcome]) -> None:
    """Every place of the table of one step; `half` stands in the race whose rate falls."""
    whole = lambda label: [  # noqa: E731
        _scored(label, "a", "meanflow 1", {0: 10.0, 1: 12.2}, {0: 0.4, 1: 0.6}),
        _scored(label, "a", "euler 50", {0: 10.0, 1: 10.0}, {0: 0.3, 1: 0.5}),
        _scored(label, "no solver", "meanflow 1", {0: 1.0}, {0: 1.0}),
    ]
    write_parts(folder, "phase3", {"solvers": whole("training")})
    write_parts(folder, "phase5", {"objective": whole("training")})
    write_parts(folder, "time-to-quality", {"end": whole("code")})
    write_parts(folder, "time-to-quality-annealed", {"end": half})


def test_one_step_stands_beside_fifty_by_the_seeds_that_have_both(tmp_path):
    half = [
        _scored("code", "b", "meanflow 1", {0: 99.0, 2: 11.001}, {0: 99.0, 2: 0.9}),
        _scored("code", "b", "euler 50", {1: 1.0, 2: 10.0}, {1: 1.0, 2: 1.0}),
    ]
    _beside_solver(tmp_path, half)
    table = one_step(read_folder(tmp_path))
    for place in ("the preset's network, labels", "the preset's network", "the race"):
        cells = cells_of(table, f"{place}: a (seeds 0 and 1)")[:6]
        assert cells == ["11.1", "10.0", "1.11 x", "0.5000", "0.4000", "1.25 x"]
    found = cells_of(table, "the race, rate to zero: b (seed 2)")[:6]
    assert found == ["11.0", "10.0", "1.10 x", "0.9000", "1.0000", "**0.90 x**"]
    assert "no solver" not in str(table)
    assert CLAIMED == WITHIN
    del half[1].values["FD-classifier"][2]
    _beside_solver(tmp_path, half)
    with pytest.raises(ConfigError, match="no seed has one step's score and the solver's; score the solver of one"):
        one_step(read_folder(tmp_path))


def test_a_race_that_one_code_has_not_run_is_an_error(tmp_path):
    mark = _mark("fullstride", "1", 60.0, _values(50, 150))
    end = Outcome({"code": "fullstride", "sampler": "meanflow 1"}, {"energy distance": _values()}, ["fullstride"])
    folder = write_parts(tmp_path, "time-to-quality", {"by-minute": [mark], "end": [end]})
    assert cells_of(race.race("energy distance", "gpu", folder), "1.0")[0] == ""
    with pytest.raises(ConfigError, match="no mark of official"):
        race.end("gpu", folder)
    moment = _mark("fullstride", "40% of the time with start-up", 60.0, _values(50, 150))
    with pytest.raises(ConfigError, match="no mark at a tenth of the time"):
        race.race(
            "energy distance", "gpu", write_parts(tmp_path, "time-to-quality", {"by-minute": [moment], "end": [end]})
        )


def test_the_table_of_recipes_has_each_ones_last_mark_and_those_beside_the_solver(tmp_path):
    marks = [(100, None), (200, (8.04, 0.3)), (300, None)]
    rows = [
        {"rate": 6e-4, "batch": 7, "step": step, "images": 7 * step, "one step": _distances(9.96, 0.5)}
        | ({"50 Euler steps": _distances(*solver)} if solver else {})
        for step, solver in marks
    ]
    rows.append({"rate": 1e-3, "batch": 7, "step": 50, "images": 1500, "one step": _distances(1.0, 2.0)})
    (tmp_path / "meanflow-race-recipes--x.json").write_text(json.dumps({"what": "recipes", "rows": rows}))
    assert [cells for cells, _ in experiments.TABLES["race-recipes"](read_folder(tmp_path)).rows] == [
        ("6e-4", "7", "200", "1", "10.0", "8.0", "0.500", "0.300"),
        ("6e-4", "7", "300", "2", "10.0", "", "0.500", ""),
        ("1e-3", "7", "50", "2", "1.0", "", "2.000", ""),
    ]


def _distances(frechet, energy):
    return {"FD-classifier": frechet, "energy distance": energy}
