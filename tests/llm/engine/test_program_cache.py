"""Executables that a second start reads: on a CPU, by runners that are told to keep them."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fullstride.llm.engine import EngineConfig
from fullstride.llm.engine.program_cache import ProgramCache
from fullstride.llm.engine.programs import Programs
from fullstride.llm.engine.runner import Runner, compiles, keep
from fullstride.llm.engine.shapes import choose_shapes
from fullstride.llm.engine.wire import DecodeInput
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models.parameters import put

SMALL = EngineConfig(max_sequences=1, max_tokens_per_step=32, block_size=4, kv_blocks=20, max_length=40)


@pytest.fixture
def no_xla_cache(monkeypatch, tmp_path):
    """JAX's own cache is off, as executables that a CPU read from it cannot be written again."""
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def runner(
    qwen3, config: EngineConfig = SMALL, progress: Callable[[int, int, int | None], None] | None = None
) -> Runner:
    kernels, device = plain(dynamic=True), jax.devices()[0]
    made = choose_shapes(config, qwen3.config, kernels, device)
    weights = put(qwen3.config, qwen3.parameters, "float32", device)
    return Runner(Programs(qwen3.config, kernels, made), weights, [device], progress, keeps=True)


def burst(started: Runner, seed: int) -> list[np.ndarray]:
    """All that a burst of decode steps returns, of a row whose state is random."""
    rng, words = np.random.default_rng(seed), {}
    state = started.state
    started.state = state._replace(
        last=jax.numpy.asarray(rng.integers(0, 200, state.last.shape), state.last.dtype),
        length=jax.numpy.full_like(state.length, 1),
        alive=jax.numpy.ones_like(state.alive),
    )
    (key,) = (key for key in started.keys() if key[0] == "decode")  # noqa: SIM118 # a method
    words = np.zeros(DecodeInput.size(1, key[3]), np.int32)
    host = DecodeInput.of(words, 1)
    host.head[:], host.capacity[:], host.tables[:] = (3, 0), 12, np.arange(1, key[3] + 1)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(started.run(key, words, quick=False))]


def test_a_second_start_neither_traces_nor_compiles_and_computes_the_same(no_xla_cache, qwen3, monkeypatch, seed):
    told: list[tuple[int, int, int | None]] = []
    first = burst(runner(qwen3, progress=lambda *given: told.append(given)), seed)
    count = told[-1][0]
    assert {(total, cached) for _, total, cached in told} == {(count, 0)}
    assert np.isfinite(first[-1]).all()

    def lower(self, key):
        raise AssertionError(f"{key} is traced")

    monkeypatch.setattr(Runner, "lower", lower)
    before = compiles()
    (unused := no_xla_cache / "unused.bin").touch()
    os.utime(unused, times=(0, 0))
    again = runner(qwen3, progress=lambda *given: told.append(given))
    assert not unused.exists()
    assert told[-1] == (count, count, count)
    assert compiles() - before <= 2  # the blank state, and casts of weights
    for a, b in zip(first, burst(again, seed), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(AssertionError, match="is traced"):  # other shapes are other programs
        runner(qwen3, replace(SMALL, kv_blocks=21))


def test_what_is_damaged_is_compiled_again(no_xla_cache, caplog):
    cache = ProgramCache(jax.devices()[0], ["one"])
    lowered = jax.jit(lambda x: 3 * x).lower(np.ones(5, np.float32))
    asked = []

    def lower():
        asked.append(1)
        return lowered

    for damage in (None, None, lambda content: content[:-7], lambda content: content[:40] + b"x" + content[41:]):
        if damage is not None:
            cache.path("key").write_bytes(damage(cache.path("key").read_bytes()))
        np.testing.assert_array_equal(cache.get("key", lower)(np.arange(5, dtype=np.float32)), 3.0 * np.arange(5))
    assert len(asked) == 3
    assert next(said for said in caplog.messages if "is damaged" in said).startswith(str(cache.path("key")))
    body = b"no executable"
    cache.path("key").write_bytes(hashlib.sha256(body).digest() + body)
    assert cache.get("key", lower) is not None
    assert len(asked) == 4
    assert any("cannot be loaded" in said for said in caplog.messages)
    other = ProgramCache(jax.devices()[0], ["two"])
    assert len({other.path("key"), cache.path("key"), cache.path(("key",))}) == 3
    assert cache.path("key").parent == no_xla_cache


def test_what_no_start_has_read_for_a_month_is_removed(no_xla_cache):
    cache, lowered = ProgramCache(jax.devices()[0], ["one"]), jax.jit(lambda x: 3 * x).lower(np.ones(5, np.float32))
    days = {"unused": 31, "read": 31, "recent": 29}
    for key in days:
        cache.get(key, lambda: lowered)
    for key, unused in days.items():
        os.utime(cache.path(key), times=(0, time.time() - unused * 86400))
    (foreign := no_xla_cache / "mine.txt").touch()
    os.utime(foreign, times=(0, 0))
    ProgramCache(jax.devices()[0], ["one"]).get("read", lambda: pytest.fail("compiled again"))
    # Writing another removes nothing: a start may be about to read it.
    cache.get("new", lambda: lowered)
    assert cache.path("unused").exists()
    cache.remove_unused()
    kept = {path.name for path in no_xla_cache.iterdir()}
    assert kept == {foreign.name, *(cache.path(key).name for key in ("read", "recent", "new"))}


def test_what_cannot_be_written_runs_and_is_named(no_xla_cache, caplog):
    cache = ProgramCache(jax.devices()[0], ["one"])
    compiled = object()  # which JAX cannot serialize
    lowered = SimpleNamespace(compile=lambda options: compiled, as_text=lambda: "")
    assert cache.get("key", lambda: lowered) is compiled
    assert not cache.path("key").exists()
    assert any("the program key is not cached" in said for said in caplog.messages)


def test_jax_keeps_the_programs_of_cpus_and_where_it_has_a_folder(no_xla_cache):
    assert not keep([jax.devices()[0]])
    assert jax.config.values["jax_compilation_cache_dir"] == str(no_xla_cache.parent / "xla")
    assert not keep([])
