import json

from typer.testing import CliRunner

from fullstride.bench import floor
from fullstride.cli import app
from fullstride.llm import bench_attention


def test_attention_stands_beside_a_gather_and_its_floor(tmp_path, monkeypatch):
    for module in (floor, bench_attention):
        monkeypatch.setitem(module.GEMM_SIZE, "cpu", 64)
        monkeypatch.setitem(module.COPY_BYTES, "cpu", 1 << 16)
    arguments = ["bench", "paged-attention", "--heads", "6", "--kv-heads", "2", "--head-dim", "16", "--block", "4"]
    arguments += ["--contexts", "5", "40", "--batch", "1", "--batch", "3", "--dtype", "float32", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("paged-attention--*.json")
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
