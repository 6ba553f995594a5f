from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from benchmarks.cases.llm.case import Span, spans, trace_of, traced


def test_what_runs_at_the_same_time_counts_once():
    found = trace_of([Span("b", 5e6, 9e6), Span("a", 1e6, 4e6), Span("a", 6e6, 7e6), Span("c", 8e6, 11e6)])
    assert (found.wall_ms, found.busy_ms) == (10, 9)
    assert found.idle == pytest.approx(0.1)
    assert found.kernels == {"a": (2, 4.0), "b": (1, 4.0), "c": (1, 3.0)}
    assert [kernel["name"] for kernel in found.to_dict(most=2)["kernels"]] == ["a", "b"]


def test_only_streams_of_gpus_are_read():
    def plane(name, line):
        event = SimpleNamespace(name=f"{name} {line}", start_ns=2.0, duration_ns=3.0)
        return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=[event])])

    planes = [plane("/host:CPU", "Stream #1"), plane("/device:GPU:0", "XLA Ops"), plane("/device:GPU:0", "Stream #7")]
    assert spans(planes) == [Span("/device:GPU:0 Stream #7", 2.0, 5.0)]


def test_without_a_gpu_there_is_nothing_to_say():
    assert traced(lambda: jnp.ones(3).block_until_ready()) is None
