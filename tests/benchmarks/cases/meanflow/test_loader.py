import pytest
import torch

from benchmarks.cases.meanflow import loader as bench_loader
from benchmarks.cases.meanflow.loader import run, steps_a_call, worker_counts
from benchmarks.cases.meanflow.options import LoaderOptions
from benchmarks.harness.results import read_result
from fullstride.errors import ConfigError
from fullstride.meanflow.data.loader import Loader, RecordBatch
from fullstride.measure.gate import GateError
from fullstride.measure.timing import HostClock, TimingPlan

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Reduce the work: the times are not tested."""
    monkeypatch.setattr(bench_loader, "TimingPlan", lambda **_: TimingPlan(warmup=0, repeats=1, seconds=0.0))
    monkeypatch.setattr(bench_loader, "RECORDS", {"memory": 50, "pictures": 9, "latents": 13})


def test_every_set_is_measured_beside_its_floor(tmp_path, capsys):
    result = read_result(run(LoaderOptions("cpu", 4, 1), tmp_path))
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["memory", *(f"{name}, {n} workers" for name in ("pictures", "latents") for n in (0, 1))]
    assert result["gate"] == {"memory": 0, "pictures": 0, "latents": 0}
    assert [row["extra"]["record_bytes"] for row in rows.values()] == [1024, *[3 * 256**2] * 2, *[8 * 32**2 * 2] * 2]
    for row, records in zip(rows.values(), (48, 8, 32, 12, 32), strict=True):
        assert row["extra"]["records_per_second"] == pytest.approx(records / row["timing"]["median_ms"] * 1e3)
        moved = 2 * records * row["extra"]["record_bytes"] / result["ceilings"]["bytes"] * 1e3
        assert row["floor"]["memory_ms"] == pytest.approx(moved)
        assert row["floor"]["arithmetic_ms"] == pytest.approx(records * row["extra"]["decode_ms"])
    assert rows["pictures, 0 workers"]["extra"]["decode_ms"] > 0
    assert "latents, 1 workers" in capsys.readouterr().out


def test_more_workers_lower_the_floor_up_to_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_loader, "cores", lambda: 2)
    bench = bench_loader.LoaderBench(torch.device("cpu"), 4, HostClock(), *[bench_loader.measure_ceilings("cpu")] * 2)
    split = bench_loader._pictures(tmp_path / "pictures", 4)
    floors = [bench._floor(split, 8, workers, decode_ms=3.0).arithmetic_ms for workers in (0, 1, 2, 4)]
    assert floors == [24, 24, 12, 12]


def test_wrong_batches_are_not_timed(tmp_path, monkeypatch):
    right = Loader.batches
    monkeypatch.setattr(Loader, "batches", lambda *args: (RecordBatch(b.raw.flip(-1), b.labels) for b in right(*args)))
    with pytest.raises(GateError, match="memory: relative error"):
        run(LoaderOptions("cpu", 4, 0), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_batch_larger_than_a_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="batch_size=51: expected at most 50"):
        run(LoaderOptions("cpu", 51, 0), tmp_path)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])],
)
def test_worker_counts(most, counts):
    assert worker_counts(most) == counts


@pytest.mark.parametrize(("least", "workers", "steps"), [(7, 0, 7), (7, 1, 8), (31, 1, 31), (31, 2, 32), (31, 16, 128)])
def test_a_call_takes_more_than_was_read_ahead(least, workers, steps):
    assert steps_a_call(least, workers) == steps
