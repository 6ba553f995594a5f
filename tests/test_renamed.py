"""Old names of modules that the documentation showed."""

import importlib
import subprocess
import sys
import warnings

import pytest

from fullstride.renamed import NAMES, RENAMED


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_the_new_module_and_says_so(old, new):
    names = [name for name in sys.modules if name in RENAMED]
    for name in names:
        del sys.modules[name]
    with warnings.catch_warnings(record=True, action="always") as told:
        found = importlib.import_module(old)
    assert [str(each.message) for each in told] == ([f"{old} is now {new}"] if old != "fullstride.bench" else [])
    assert found is importlib.import_module(new)
    assert found.__name__ == new
    assert found.__spec__ is not None
    assert found.__spec__.name == new


@pytest.mark.parametrize(("module", "old", "new"), [(m, *pair) for m, own in NAMES.items() for pair in own.items()])
def test_an_old_name_in_a_module_is_the_new_one_and_says_so(module, old, new):
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_what_the_pages_showed_imports_as_it_did():
    lines = [
        "from fullstride.bench.floor import floor, measure_ceilings",
        "from fullstride.bench.timing import Plan, clock_for, measure",
        "from fullstride.bert.model import Bert",
        "from fullstride.meanflow.objective import MeanFlowLoss",
        "from fullstride.meanflow.times import LogitNormalV1",
        "import fullstride.meanflow.samplers as s; s.meanflow_sample",
    ]
    for name in [name for name in sys.modules if name in RENAMED]:
        del sys.modules[name]
    with warnings.catch_warnings(action="ignore"):
        exec("\n".join(lines), {})
    # Each warning is of the line that imports, where no checker of types stands between.
    done = subprocess.run([sys.executable, "-W", "always", "-c", "\n".join(lines[:2])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<string>:1: DeprecationWarning: fullstride.bench.floor is now" in done.stderr
    assert "<string>:2: DeprecationWarning: fullstride.bench.timing is now" in done.stderr


def test_nothing_else_is_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fullstride.benches")
    for module, name in (("fullstride.meanflow.objective", "nothing"), ("fullstride.bert.model", "nothing")):
        with pytest.raises(AttributeError, match=name):
            getattr(importlib.import_module(module), name)
