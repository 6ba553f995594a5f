"""Tables about the engine's workloads: each cell is the file's number, and what is not there is an error or empty."""

from pathlib import Path

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import engine
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import ms, row, write_rows
from tests.benchmarks.report.markup import as_number, cells_of

QWEN = {"model": "qwen3-0.6b", "precision": "bfloat16"}
SMOL = {"model": "smollm2", "precision": "float32", "kernels": "plain"}
# Of the workload with transformers beside it: three prompts of 50 tokens each.
SPOKEN = {"section": "small", "prompts": 3, "tokens": 150}
PEERS = ("fullstride", "transformers, one by one", "transformers, batched", "vLLM")
CONTEXTS = ((1, 400), (16, 900))


def _spoken(names: tuple[str, ...]) -> list[Row]:
    return [row(name, tokens_per_second=ms()) for name in names]


def _milliseconds(text: str, unit: str):
    """A time as it is shown, which has two places of seconds or one of milliseconds."""
    return pytest.approx(float(text) * {"ms": 1, "s": 1e3}[unit], abs={"ms": 0.06, "s": 6}[unit])


def test_the_engine_stands_beside_transformers_in_the_same_run(tmp_path):
    write_rows(tmp_path, "llm", _spoken(PEERS), **SPOKEN, **SMOL)
    folder = write_rows(tmp_path, "llm", _spoken(PEERS[:3]), device="cpu", **SPOKEN, **SMOL)
    table = engine.small_on_cpu(folder)
    (result,) = (result for result in folder.results if result.data["device"] == "cpu")
    for one in result.rows:
        median, spread, step, speed, over = cells_of(table, {"fullstride": "this engine"}.get(one.name, one.name))
        steps = 150 if one.name == "transformers, one by one" else 50
        assert as_number(step) == pytest.approx(one.median / steps, rel=6e-3)
        time, unit = median.split()
        assert one.median == _milliseconds(time, unit)
        assert spread.endswith(f" {unit}")
        assert [one.p10, one.p90] == [_milliseconds(text, unit) for text in spread.removesuffix(f" {unit}").split("-")]
        assert as_number(speed) == pytest.approx(one.extra["tokens_per_second"], rel=1e-3, abs=0.5)
        assert as_number(over) == pytest.approx(one.over_floor, rel=0.01, abs=0.5)


def test_vllm_stands_there_too_where_it_ran(tmp_path):
    *_, theirs = rows = _spoken(PEERS)
    folder = write_rows(tmp_path, "llm", rows, at="beside-vllm", **SPOKEN, kernels="token", **QWEN)
    speed = cells_of(engine.small("token", folder), "vLLM")[3]
    assert as_number(speed) == pytest.approx(theirs.extra["tokens_per_second"], rel=1e-3, abs=0.5)


def test_a_run_without_transformers_has_no_table_beside_them(tmp_path):
    folder = write_rows(tmp_path, "llm", _spoken(PEERS[:1]), **SPOKEN, kernels="token", **QWEN)
    with pytest.raises(ConfigError, match="no row 'transformers, one by one'"):
        engine.small("token", folder)


@pytest.mark.parametrize("named", [{}, {"kernels": "plain"}])
def test_the_plain_set_is_found_whether_its_result_names_it_or_not(tmp_path, named):
    for kernels, pool in (("token", {}), ("plain", {"kv_cache_dtype": "fp8"})):
        write_rows(tmp_path, "llm", _spoken(PEERS), **SPOKEN, kernels=kernels, **pool, **QWEN)
    ours, *theirs = _spoken(PEERS)
    folder = write_rows(tmp_path, "llm", [ours, *theirs], **SPOKEN, **named, **QWEN)
    speed = cells_of(engine.small("plain", folder), "this engine")[3]
    assert as_number(speed) == pytest.approx(ours.extra["tokens_per_second"], rel=1e-3, abs=0.5)


def _sets(path: Path) -> tuple[Folder, dict[tuple[str, str], Row]]:
    """Results of all sets of kernels, and each engine's row."""
    found = {}
    for section, _, _, ran in engine.WORKLOADS:
        for kernels in ran:
            (found[section, kernels],) = rows = _spoken(PEERS[:1])
            write_rows(path, "llm", rows, section=section, kernels=kernels, **QWEN)
    steps = [row(f"batch {b}, context {c}", tokens_per_second=ms()) for b, c, _ in engine.STEPS]
    waits = [row(name) for name, *_ in engine.WAITS]
    for section, rows in (("sweep", steps), ("latency", waits)):
        found |= {(section, r.name): r for r in rows}
        write_rows(path, "llm", rows, section=section, kernels="token", **QWEN)
    return read_folder(path), found


def test_sets_of_kernels_stand_beside_what_was_wanted_and_the_bound(tmp_path):
    folder, found = _sets(tmp_path)
    table = engine.kernels(folder)
    for section, what, wanted, ran in engine.WORKLOADS:
        cells = cells_of(table, what)
        assert cells[0] == f"{wanted:,}"
        for name, cell in zip(engine.SETS, cells[1:4], strict=True):
            speed = found[section, name].extra["tokens_per_second"] if name in ran else None
            assert cell == "" if speed is None else as_number(cell) == pytest.approx(speed, rel=1e-3, abs=0.5)
        ours = found[section, "token"]
        bound = ours.extra["tokens_per_second"] * ours.timing.median_ms / ours.floor.ms
        assert as_number(cells[4]) == pytest.approx(bound, rel=1e-3, abs=0.5)
    for batch, context, _ in engine.STEPS:
        step = f"batch {batch}, context {context}"
        speed = found["sweep", step].extra["tokens_per_second"]
        assert as_number(cells_of(table, f"{step}: tokens/s")[3]) == pytest.approx(speed, rel=1e-3, abs=0.5)
    for name, what, unit, wanted in engine.WAITS:
        time = found["latency", name].timing.median_ms / unit
        assert cells_of(table, what)[:4] == [str(wanted), "", "", f"**{time:.1f}**"]


def _parallel(path: Path, model: str, sets: tuple[tuple[str, int], ...]) -> tuple[Folder, dict[str, Row]]:
    rows = []
    for kernels, count in sets:
        for batch, context in CONTEXTS:
            name = f"{count} device{'s' * (count > 1)}, {kernels}, batch {batch}, context {context}"
            extra = {"devices": count, "batch": batch, "context": context, "kernels": kernels, "speed_up": ms()}
            rows.append(row(name, **extra))
    folder = write_rows(path, "llm", rows, section="parallel", model=model, precision="bfloat16", kernels=model)
    return folder, {r.name: r for r in rows}


def test_two_gpus_stand_beside_one_of_the_same_kernels(tmp_path):
    _, large = _parallel(tmp_path, "qwen3-8b", (("paged", 1), ("paged", 2), ("paged", 4)))
    folder, _ = _parallel(tmp_path, "qwen3-0.6b", (("token", 1), ("paged", 1), ("paged", 2)))
    table = engine.parallel(folder)
    for batch, context in CONTEXTS:
        step = f"paged, batch {batch}, context {context}"
        one, two = (large[f"{count}, {step}"] for count in ("1 device", "2 devices"))
        expected = ["", f"{one.timing.median_ms:.2f}", f"**{two.timing.median_ms:.2f}**"]
        assert cells_of(table, f"Qwen3-8B, {batch}, {context}")[:4] == [*expected, f"{two.extra['speed_up']:.2f}"]
        assert cells_of(table, f"Qwen3-0.6B, {batch}, {context}")[0] != ""


def test_a_result_of_one_gpu_alone_is_an_error(tmp_path):
    folder, _ = _parallel(tmp_path, "qwen3-8b", (("paged", 1),))
    with pytest.raises(ConfigError, match="no row '2 devices, paged, batch 1, context 400'"):
        engine.parallel(folder)
