"""Derivatives of models that FSDP2 and DistributedDataParallel wrap, and of attention whose rows are divided."""

import pytest


@pytest.mark.parametrize("module", ["two_processes", "two_processes_attention"])
def test_gradients_of_two_processes_are_those_of_one(forked, module, tmp_path):
    for done in forked(*([f"tests.jvp.{module}", str(rank), str(tmp_path / "store")] for rank in (0, 1))):
        assert done.returncode == 0, done.stderr
