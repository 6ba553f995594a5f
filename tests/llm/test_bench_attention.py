import json

from typer.testing import CliRunner

from fullstride.bench import floor
from fullstride.bench.gate import GateError
from fullstride.cli import app
from fullstride.llm import bench_attention


def small(monkeypatch):
    monkeypatch.setitem(floor.GEMM_SIZE, "cpu", 64)
    monkeypatch.setitem(floor.COPY_BYTES, "cpu", 1 << 16)


def test_attention_stands_beside_a_gather_and_its_floor(tmp_path, monkeypatch):
    small(monkeypatch)
    arguments = ["bench", "paged-attention", "--heads", "6", "--kv-heads", "2", "--head-dim", "16", "--block", "4"]
    arguments += ["--contexts", "5", "40", "--batch", "1", "--batch", "3", "--dtype", "float32", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("paged-attention--*--contexts-5-40--batch-1-3-block-4--*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == [
        f"batch {n}: {way}" for n in (1, 3) for way in ("plain", "gather")
    ]
    assert all(0 <= error < 1e-5 for error in found["gate"].values())
    for row in found["rows"]:
        # Keys and values of two heads of 16 elements of 4 bytes.
        moved = row["extra"]["tokens"] * 2 * 2 * 16 * 4
        assert abs(row["floor"]["memory_ms"] - moved / found["ceilings"]["bytes"] * 1e3) < 1e-9


def test_a_set_that_cannot_run_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["bench", "paged-attention", "--kernels", "paged", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "compute capability 9.0" in " ".join(result.stderr.split())


def test_what_is_wrong_is_not_timed_and_costs_nothing_that_is_right(tmp_path, monkeypatch):
    small(monkeypatch)
    right = bench_attention._gate

    def off(way, case, pool, norms, shape):
        error, pool = right(way, case, pool, norms, shape)
        return (0.5 if way.call.func is bench_attention.gather and len(case.contexts) == 1 else error), pool

    monkeypatch.setattr(bench_attention, "_gate", off)
    arguments = ["bench", "paged-attention", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--block", "4"]
    arguments += ["--contexts", "5", "9", "--batch", "1", "--batch", "2", "--dtype", "float32", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--kernels", "plain", "--seed", "3"])
    assert result.exit_code == 1
    assert isinstance(result.exception, GateError) or "gather, batch 1: relative error 5.00e-01" in result.output
    (file,) = tmp_path.glob("paged-attention--*--plain--batch-1-2-block-4-seed-3--*.json")
    names = [row["name"] for row in json.loads(file.read_text())["rows"]]
    assert names == ["batch 1: plain", "batch 2: plain", "batch 2: gather"]
