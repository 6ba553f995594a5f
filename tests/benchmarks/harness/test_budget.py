import pytest
import torch

from benchmarks.harness.budget import NO_MEMORY, Budget, one_stream, reason, say

CPU = torch.device("cpu")


def test_a_budget_is_spent_after_its_time():
    assert Budget.of(0.0).spent
    assert not Budget.of(100.0).spent


def test_a_processor_has_no_streams():
    with one_stream(CPU):
        assert torch.ones(1).item() == pytest.approx(1)


def test_a_missing_row_has_its_reason_in_one_line():
    assert reason(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == NO_MEMORY
    assert reason(RuntimeError("view size\n  is  not")) == "RuntimeError: view size is not"
    assert len(reason(ValueError("x" * 1000))) < 320


def test_progress_is_told_apart_from_the_result(capsys):
    say("gate: [a, b] 1.5")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "gate: [a, b] 1.5\n")
