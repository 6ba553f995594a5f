import os
import subprocess
import sys

import jax
import pytest

from fullstride.step.jax.compile_cache import keep_compiled

SCRIPT = """
import sys, jax, jax.numpy as jnp
from fullstride.step.jax.compile_cache import keep_compiled
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
print(keep_compiled(sys.argv[1] or None, seconds=0.0))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((5, 5))).block_until_ready()
print(len(hits) > 0)
"""


def _process(folder, cache):
    environment = os.environ | {"FULLSTRIDE_CACHE": str(cache)}
    command = [sys.executable, "-c", SCRIPT, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_another_process_compiles_nothing_again(tmp_path):
    assert _process(str(tmp_path / "here"), tmp_path) == [str(tmp_path / "here"), "False"]
    assert _process(str(tmp_path / "here"), tmp_path) == [str(tmp_path / "here"), "True"]


@pytest.fixture
def _settings():
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("_settings")
def test_it_lies_in_the_cache_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    assert keep_compiled() == tmp_path / "xla"
    assert (tmp_path / "xla").is_dir()
