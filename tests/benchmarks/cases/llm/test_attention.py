import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cases.llm import attention as bench_attention
from benchmarks.cases.llm import attention_work as pallas
from benchmarks.cases.llm.attention_work import Way, draw, gather, slots
from benchmarks.cli.app import app
from fullstride.llm.kernels.interface import AttentionShape, QKNorm
from fullstride.measure.gate import GateError


def test_attention_stands_beside_a_gather_and_its_floor(tmp_path):
    arguments = ["paged-attention", "--heads", "6", "--kv-heads", "2", "--head-dim", "16", "--block", "4"]
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


def test_an_fp8_cache_stands_beside_the_one_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_attention, "PLAN", bench_attention.GLANCE)
    arguments = [
        "paged-attention",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "32",
        "--block",
        "4",
        "--no-beside",
    ]
    arguments += ["--contexts", "30", "40", "--batch", "3", "--dtype", "fp8", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("paged-attention--*--fp8--*.json")
    found = json.loads(file.read_text())
    full, codes = found["rows"]
    assert (full["name"], codes["name"]) == ("batch 3: plain", "batch 3: plain, fp8")
    assert codes["floor"]["memory_ms"] / full["floor"]["memory_ms"] == pytest.approx((32 + 2) / 64)
    assert 0.01 < codes["extra"]["relative_error"] < 0.06
    assert all(0 <= error < 0.01 for error in found["gate"].values())


@pytest.mark.parametrize("width", [7, pytest.param(16, marks=pytest.mark.thorough)])
def test_jaxs_own_kernel_reads_and_writes_the_same_pool(width, monkeypatch):
    monkeypatch.setattr(bench_attention, "PLAN", bench_attention.GLANCE)
    shape, rng = AttentionShape(6, 2, 16, 4, 16**-0.5, 1e-6), np.random.default_rng()
    case = draw(rng, shape, 3, 1, 4 * width, "float32")
    pool = jnp.asarray(rng.standard_normal((2, 2, slots(shape, 3, 4 * width), 2, 16)), "float32")
    norms = QKNorm(*(jnp.asarray(rng.uniform(0.5, 1.5, 16), "float32") for _ in range(2)))
    np.testing.assert_array_equal(pallas.pool_of(pallas.pages(pool, shape=shape), shape=shape), pool)
    for way in pallas.ways(shape, interpret=True).values():
        way = way._replace(call=partial(way.call, norms=norms, shape=shape))
        error, _, left = bench_attention._gate(way, case, pool.copy(), norms, shape)
        assert error < 1e-5
        _, right = gather(case.qkv, pool, jnp.int32(1), case.batch, norms, shape)
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
        assert np.abs(left - pool).max() > 0.1
        _, calls, left = bench_attention._timed(way, case, pool, shape, 0.0)
        np.testing.assert_allclose(left[1], right[1], rtol=1e-6, atol=1e-6)
        assert calls == 2  # layers


def test_another_kernel_that_breaks_costs_nothing_of_the_others(tmp_path, monkeypatch):

    def breaks(*_, **__):
        raise NotImplementedError("not on this machine")

    monkeypatch.setattr(bench_attention, "gather", breaks)
    monkeypatch.setattr(bench_attention, "Way", partial(Way, another=True))
    arguments = ["paged-attention", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--block", "4"]
    arguments += ["--contexts", "5", "9", "--batch", "2", "--dtype", "float32", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("paged-attention--*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["batch 2: plain"]
    assert found["conditions"]["left_out"] == ["batch 2: gather: NotImplementedError: not on this machine"]


@pytest.mark.parametrize(("given", "needed"), [(("--kernels", "paged"), "8.0 or newer"), (("--target", "a100"), "9.0")])
def test_what_cannot_run_is_refused(given, needed, tmp_path):
    result = CliRunner().invoke(app, ["paged-attention", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"compute capability {needed}" in " ".join(result.stderr.split())


@pytest.mark.parametrize("given", [("--seed", "-1"), ("--head-dim", "7")])
def test_what_cannot_be_is_told_in_a_line(given, tmp_path):
    result = CliRunner().invoke(app, ["paged-attention", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert given[0] in result.stderr


def test_what_is_wrong_is_not_timed_and_costs_nothing_that_is_right(tmp_path, monkeypatch):
    right = bench_attention._gate

    def off(way, case, pool, norms, shape):
        error, *rest = right(way, case, pool, norms, shape)
        return (0.5 if way.call.func is bench_attention.gather and len(case.contexts) == 1 else error), *rest

    monkeypatch.setattr(bench_attention, "_gate", off)
    arguments = ["paged-attention", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--block", "4"]
    arguments += ["--contexts", "5", "9", "--batch", "1", "--batch", "2", "--dtype", "float32", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--kernels", "plain", "--seed", "3"])
    assert result.exit_code == 1
    assert isinstance(result.exception, GateError) or "gather, batch 1: relative error 5.00e-01" in result.output
    (file,) = tmp_path.glob("paged-attention--*--plain--batch-1-2-block-4-seed-3--*.json")
    names = [row["name"] for row in json.loads(file.read_text())["rows"]]
    assert names == ["batch 1: plain", "batch 2: plain", "batch 2: gather"]
