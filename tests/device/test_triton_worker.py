import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SOURCE = """
import triton
import triton.language as tl
from tests import made_kernels_others as others

FACTOR = tl.constexpr(2)


@triton.jit
def helper(x):
    return x * FACTOR


@triton.jit
def kernel(y_ptr):
    tl.store(y_ptr, others.more(helper(1)) + FACTOR + others.FACTOR)


@triton.jit
def other(y_ptr):
    tl.store(y_ptr, others.more(3))
"""
OTHERS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(5)


@triton.jit
def more(x):
    return x + 1
"""


def imported(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digests(folder: Path, source: str, others: str) -> str:
    """Of `kernel` in a process of its own, which the interpreter of kernels is not switched on for."""
    folder.mkdir()
    (folder / "kernels.py").write_text(source)
    (folder / "others.py").write_text(others)
    script = (
        "import sys, tests; from pathlib import Path; from tests.device.test_triton_worker import imported;"
        "from fullstride.device.triton_worker import source_of; folder = Path(sys.argv[1]);"
        "tests.made_kernels_others = imported('tests.made_kernels_others', folder / 'others.py');"
        "made = imported('made_kernels', folder / 'kernels.py');"
        "before = source_of(made.other) if 'last' in sys.argv else '';"
        "print(source_of(made.kernel))"
    )
    order = ["last"] if "order" in folder.name else []
    command = [sys.executable, "-c", script, str(folder), *order]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_a_source_is_that_of_all_it_calls_and_of_constants_and_not_of_others(tmp_path):
    same = [
        digests(tmp_path / "first", SOURCE, OTHERS),
        digests(tmp_path / "other_order", SOURCE, OTHERS),
        digests(tmp_path / "another", SOURCE.replace("more(3)", "more(4)"), OTHERS),
    ]
    assert len(set(same)) == 1
    assert len(same[0]) == 64
    changed = [
        digests(tmp_path / "own", SOURCE.replace("helper(1)", "helper(7)"), OTHERS),
        digests(tmp_path / "called", SOURCE.replace("x * FACTOR", "x - FACTOR"), OTHERS),
        digests(tmp_path / "constant", SOURCE.replace("constexpr(2)", "constexpr(3)"), OTHERS),
        digests(tmp_path / "elsewhere", SOURCE, OTHERS.replace("x + 1", "x + 2")),
        digests(tmp_path / "constant_elsewhere", SOURCE, OTHERS.replace("constexpr(5)", "constexpr(3)")),
    ]
    assert all(a != b for a, b in itertools.combinations([same[0], *changed], 2))
