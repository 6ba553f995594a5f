"""The command that runs Equinox's tests with the replacement, on a checkout of two tests."""

import pytest

from tests.step.jax.foreign import equinox_suite

SUITE = """
import equinox as eqx
import jax.numpy as jnp


def test_doubles():
    assert eqx.filter_jit(lambda x: 2 * x)(jnp.ones(())) == 2


def test_the_original_alone():
    assert eqx.filter_jit.__module__.startswith("equinox")


def test_neither():
    raise AssertionError
"""


# With the replacement its process ends early.
DYING = """
import os

import equinox as eqx


def test_before():
    pass


def test_dies():
    if not eqx.filter_jit.__module__.startswith("equinox"):
        os._exit(7)


def test_after():
    pass
"""


def test_what_the_replacement_loses_was_passed_before():
    before = {"test_a.py::x": "passed", "test_a.py::y": "failed", "test_b.py::x": "passed", "test_b.py::z": "skipped"}
    after = {"test_a.py::x": "passed", "test_a.py::y": "passed", "test_b.py::x": "failed"}
    assert equinox_suite.lost(before, after) == ["test_b.py::x"]
    assert equinox_suite.lost(before, {}) == ["test_a.py::x", "test_b.py::x"]


@pytest.mark.thorough
def test_a_test_that_the_replacement_alone_fails_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"no tests/test_\*\.py calls filter_jit; expected a checkout"):
        equinox_suite.main(str(tmp_path))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_jit.py").write_text(SUITE)
    (tmp_path / "tests" / "test_zzz.py").write_text(DYING)
    assert equinox_suite.main(str(tmp_path)) == 1
    one, two, *remarks = capsys.readouterr().out.splitlines()[2:]
    assert (one, two) == ("| `test_jit.py` | 3 | 2 | 1 |", "| `test_zzz.py` | 3 | 3 | 1 |")
    assert remarks[:2] == [
        "| all | 6 | 5 | 2 |",
        "fails with the replacement alone: tests/test_jit.py::test_the_original_alone (failed)",
    ]
    assert remarks[2].startswith("test_zzz.py with cached_filter_jit: pytest exited with 7: ")
    assert remarks[-2:] == [
        f"fails with the replacement alone: tests/test_zzz.py::{name} (not run)" for name in ("test_dies", "test_after")
    ]


@pytest.mark.thorough
def test_a_file_that_takes_too_long_is_stopped_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LIMIT", "0.2")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_jit.py").write_text(SUITE)
    assert equinox_suite.main(str(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `test_jit.py` | 0 | 0 | 0 |",
        "| all | 0 | 0 | 0 |",
        "test_jit.py with filter_jit: stopped after 0.2 s",
        "test_jit.py with cached_filter_jit: stopped after 0.2 s",
    ]
