"""The table of kernels by kind: each cell is a number of a file or a difference; what was not profiled is an error."""

from pathlib import Path

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import profile
from benchmarks.report.doc_tables.meanflow import BY_SHARE
from benchmarks.report.doc_tables.training import COMPILED
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import RANDOM, row, write_rows
from tests.benchmarks.report.markup import cells_by_row

WAYS = {"eager": BY_SHARE, "compile": COMPILED}
NAMES = ("FM MSE", "MeanFlow 100%")


def _profiles(path: Path, without: str = "") -> tuple[Folder, list[dict]]:
    """A file of each way with both steps, as the bench writes them, and their profiles in the table's order."""
    every = []
    for backend, conditions in WAYS.items():
        rows: list[Row] = []
        for name in NAMES:
            groups = {kind: RANDOM.uniform(0, 9) for kind in profile.KINDS.values()} | {"optimizer": 0.0}
            made = {"ms": sum(groups.values()), "launches": float(RANDOM.randrange(9999)), "groups": groups}
            kept = {} if f"{name}, {backend}" == without else {"profile": made}
            rows.append(row(f"{name}, {backend}", name=name, backend=backend, batch=64, **kept))
            every.append(made)
        write_rows(path, "meanflow-step", rows, **conditions)
    return read_folder(path), every


def test_each_kind_has_both_steps_and_what_lies_between_them_by_each_way(tmp_path):
    folder, every = _profiles(tmp_path)
    found = cells_by_row(profile.profile(folder))
    for shown, kind in profile.KINDS.items():
        flow, full, fast, faster = (made["groups"][kind] for made in every)
        expected = [flow, full, full - flow, fast, faster, faster - fast]
        assert [float(cell) for cell in found[shown][:6]] == pytest.approx(expected, abs=6e-3)
    # Rounded to what is shown, the kinds are all of it.
    for place in range(6):
        kinds = sum(float(found[shown][place]) for shown in profile.KINDS)
        assert float(found["all"][place]) == pytest.approx(kinds, abs=0.04)
    launches = [int(made["launches"]) for made in every]
    assert [int(cell.replace(",", "")) for cell in found["kernels launched"][:2]] == launches[:2]


def test_a_step_that_was_not_profiled_is_an_error(tmp_path):
    folder, _ = _profiles(tmp_path, without="MeanFlow 100%, compile")
    with pytest.raises(ConfigError, match="no profile of 'MeanFlow 100%, compile'; measure the case again"):
        profile.profile(folder)
