"""Tables about the engine's kernels: each cell is the file's number, and only what was left out is empty."""

from pathlib import Path

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import kernels
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import ms, row, write_rows
from tests.benchmarks.report.markup import as_number, cells_of

BATCHES, CONTEXTS = (1, 2, 16), (128, 4096)
WAYS = ("paged", "in a chain", "gather")


def _attention(path: Path, ways: tuple[tuple[str, ...], ...]) -> tuple[Folder, list[dict[str, Row]]]:
    """A result of each of the table's shapes, each with its ways."""
    found = []
    for shape, of in zip(kernels.ATTENTION, ways, strict=True):
        rows = [row(f"batch {n}: {way}", tokens=7, share_of_copy_rate=ms() / 1e4) for n in BATCHES for way in of]
        found.append({r.name: r for r in rows})
        write_rows(path, "paged-attention", rows, **shape, precision="bfloat16", block=48)
    return read_folder(path), found


def test_attention_is_told_in_microseconds_beside_its_floor_and_the_gather(tmp_path):
    folder, (first, _) = _attention(tmp_path, (WAYS, WAYS[:2]))
    table = kernels.paged(kernels.ATTENTION, folder)
    for batch in BATCHES:
        launched, chained, gather = (first[f"batch {batch}: {way}"] for way in WAYS)
        times = (chained.floor.ms, launched.timing.median_ms, chained.timing.median_ms)
        cells = cells_of(table, f"32 / 8, block 48 | 500-2048 | {batch}")
        assert cells[:3] == [f"{1e3 * time:.1f}" for time in times]
        assert cells[3] == f"{100 * chained.extra['share_of_copy_rate']:.0f} %"
        assert as_number(cells[4]) == pytest.approx(1e3 * gather.timing.median_ms, abs=0.5)
        assert cells_of(table, f"16 / 8, block 48 | 300-500 | {batch}")[4] == ""


def test_jaxs_own_kernel_has_a_column_where_it_ran(tmp_path):
    splits = tuple(f"JAX's Pallas, {n} splits" for n in (16, 4))
    folder, (first, _) = _attention(tmp_path, ((*WAYS, *splits), WAYS[:2]))
    table = kernels.paged(kernels.ATTENTION, folder)
    for batch in BATCHES:
        both = [first[f"batch {batch}: {way}"].timing.median_ms for way in splits]
        cells = cells_of(table, f"32 / 8, block 48 | 500-2048 | {batch}")
        assert as_number(cells[5]) == pytest.approx(1e3 * min(both), abs=0.5)
        assert cells_of(table, f"16 / 8, block 48 | 300-500 | {batch}")[4:6] == ["", ""]


def test_one_shape_alone_has_a_table_of_its_own(tmp_path):
    folder, _ = _attention(tmp_path, (WAYS, WAYS))
    assert "16 / 8" not in str(kernels.TABLES["paged-attention-32-8"](folder))
    assert "16 / 8" in str(kernels.TABLES["paged-attention"](folder))


def test_attention_without_the_chain_is_an_error(tmp_path):
    folder, _ = _attention(tmp_path, (("paged", "gather"), WAYS))
    with pytest.raises(ConfigError, match="no row 'batch 1: in a chain'"):
        kernels.paged(kernels.ATTENTION, folder)


def _sweep(path: Path, left_out: list[str], missing: str, **conditions) -> tuple[Folder, dict[str, Row]]:
    rows = [
        row(f"batch {batch}, context {context}", batch=batch, context=context, tokens_per_second=1e3 * ms())
        for batch in BATCHES
        for context in CONTEXTS
    ]
    ran = [r for r in rows if r.name != missing]
    conditions |= {"model": "qwen3-0.6b", "precision": "bfloat16", "section": "sweep", "left_out": left_out}
    return write_rows(path, "llm", ran, **conditions), {r.name: r for r in rows}


def test_steps_have_their_speed_and_share_and_what_was_left_out_is_empty(tmp_path):
    last = f"batch {BATCHES[-1]}, context {CONTEXTS[-1]}"
    _sweep(tmp_path, [last], last, kernels="chained", kv_cache_dtype="fp8")
    folder, rows = _sweep(tmp_path, [last], last, kernels="token")
    table = kernels.sweep("token", None, folder)
    assert "| batch | context 128 | context 4,096 |" in str(table)
    for batch in BATCHES:
        for context, cell in zip(CONTEXTS, cells_of(table, str(batch)), strict=True):
            name = f"batch {batch}, context {context}"
            share = 100 * rows[name].floor.ms / rows[name].timing.median_ms
            assert cell == ("" if name == last else f"{rows[name].extra['tokens_per_second']:,.0f} ({share:.0f}%)")


def test_a_step_that_is_missing_for_no_reason_is_an_error(tmp_path):
    missing = f"batch {BATCHES[0]}, context {CONTEXTS[0]}"
    folder, _ = _sweep(tmp_path, [], missing, kernels="chained", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=f"no row '{missing}'"):
        kernels.sweep("chained", "fp8", folder)
