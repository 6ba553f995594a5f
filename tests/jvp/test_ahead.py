import os
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.thorough)])
def test_kernels_compile_for_hopper(which):
    command = [sys.executable, "-m", "tests.jvp.ahead", which]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for family in ("attentions", "norms", "averages"):
        assert re.search(f"{family}: [1-9]", done.stdout)


# Launches that threads compile are tested in tests/device, too.
@pytest.mark.parametrize(
    "by", ["processes", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("threads", "changed"))]
)
def test_kernels_of_traced_operators_are_compiled_meanwhile(by, tmp_path):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 99.9, V99.9.9"\n')
    ptxas.chmod(0o755)
    command = [sys.executable, "-m", "tests.jvp.while_traced", by, *([str(ptxas)] if by == "processes" else [])]
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled while traced" in done.stdout
    # One fault is said, and only where it is meant; a kernel that fails here is compiled at its launch all the same.
    assert done.stderr.count("could not be compiled ahead") == (by == "changed"), done.stderr
    assert done.stderr.count("was changed since") == (by == "changed")
