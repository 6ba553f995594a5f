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


def test_the_table_counts_what_passes_with_the_original():
    before = {"test_a.py::x": "passed", "test_a.py::y": "failed", "test_b.py::x": "passed", "test_b.py::z": "skipped"}
    after = {**before, "test_a.py::y": "passed", "test_b.py::x": "failed"}
    assert equinox_suite.table(before, after)[2:] == [
        "| `test_a.py` | 1 | 1 |",
        "| `test_b.py` | 1 | 0 |",
        "| all | 2 | 1 |",
        "fails with the replacement alone: test_b.py::x",
    ]


@pytest.mark.thorough
def test_a_test_that_the_replacement_alone_fails_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"no tests/test_\*\.py calls filter_jit; expected a checkout"):
        equinox_suite.main(str(tmp_path))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_jit.py").write_text(SUITE)
    assert equinox_suite.main(str(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `test_jit.py` | 2 | 1 |",
        "| all | 2 | 1 |",
        "fails with the replacement alone: test_jit.py::test_the_original_alone",
    ]
