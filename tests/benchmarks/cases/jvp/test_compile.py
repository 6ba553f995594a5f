import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.cases.jvp import run as bench_compile
from benchmarks.cases.jvp.attention import BENCH as ATTENTION
from benchmarks.cases.jvp.common import make_setup
from benchmarks.cases.jvp.norms import BENCH as NORMS
from benchmarks.cases.jvp.run import compile_ahead, in_processes
from benchmarks.cases.jvp.shapes import NORMS_SMALL, AttentionShape
from fullstride.measure.timing import CudaClock
from tests.benchmarks.cases.jvp.quick import quick  # noqa: F401, a fixture

CPU = torch.device("cpu")


def test_every_call_is_made_in_another_process_and_none_of_their_errors_here(tmp_path):
    calls = [partial(Path.touch, tmp_path / name) for name in ("a", "missing/b", "c")]
    in_processes(2, calls)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


@pytest.mark.parametrize(("jobs", "name", "expected"), [(2, "triton", [2]), (0, "triton", []), (2, "plain", [])])
def test_only_kernels_are_compiled(quick, monkeypatch, jobs, name, expected):  # noqa: F811
    asked = []
    monkeypatch.setattr(bench_compile, "chosen", lambda *_: name)
    monkeypatch.setattr(bench_compile, "in_processes", lambda jobs, calls: asked.append(jobs))
    compile_ahead(make_setup(CPU, "fp32", "auto", 60.0), jobs, [])
    assert asked == expected


def test_the_calls_run_ours_in_every_format(quick):  # noqa: F811
    setup = replace(make_setup(CPU, "fp32", "plain", 60.0), clock=CudaClock())
    attention = ATTENTION.kernels(setup, [AttentionShape("a", 1, 2, 5, 8)])
    norms = NORMS.kernels(setup, NORMS_SMALL[:2])
    assert [call.args[0].precision for call in attention] == ["fp32", "fp32", "bf16", "fp16", "fp32", "tf32", "tf32x3"]
    assert len(norms) == 2 * 2 + 3 * len(NORMS_SMALL)
    for call in (*attention[:3], *norms[:6]):
        pickle.loads(pickle.dumps(call))()
