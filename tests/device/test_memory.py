import pytest
import torch

from fullstride.device.memory import Fit, fitting_batch, peak_memory, report
from fullstride.errors import is_out_of_memory

CPU = torch.device("cpu")


def limited_to(most: int, tried: list[int]):
    def trial(size: int) -> None:
        tried.append(size)
        if size > most:
            raise torch.OutOfMemoryError("no room")

    return trial


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_the_largest_batch_that_fits_keeps_the_optimizers_batch():
    tried: list[int] = []
    fit = fitting_batch(limited_to(13, tried), 64, 3, CPU)
    assert fit is not None
    assert (fit.batch_size, fit.accumulation) == (12, 16)
    assert tried == [48, 32, 24, 16, 12]
    assert fit.peak > 0


def test_a_size_that_is_not_allowed_is_not_tried():
    tried: list[int] = []
    fit = fitting_batch(limited_to(13, tried), 64, 1, CPU, lambda size: size % 4 == 0)
    assert fit is not None
    assert (fit.batch_size, fit.accumulation) == (8, 8)
    assert fitting_batch(limited_to(2, tried), 64, 1, CPU, lambda size: size % 4 == 0) is None
    assert min(tried) == 4


def test_nothing_fits():
    assert fitting_batch(limited_to(0, []), 6, 1, CPU) is None
    assert "choose a smaller model" in report(6, 1, 2**30, None, CPU)


def test_another_error_is_not_hidden():
    def trial(size: int) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fitting_batch(trial, 4, 1, CPU)


def test_the_report_says_what_it_took_and_what_fits():
    assert "fits (tried) and is another; every" in report(128, 1, 2**30, Fit(32, 4, 2**30), CPU, "is another")
    text = report(128, 1, 3 * 2**30, Fit(32, 4, 2**30), CPU)
    assert "data.batch_size=128 gradient_accumulation_steps=1: the peak was 3.00 GiB" in text
    assert "data.batch_size=32 gradient_accumulation_steps=4 fits (tried) and takes" in text


def test_the_peak_grows_with_what_is_held():
    before = peak_memory(CPU)
    held = torch.ones(64 * 2**20)
    assert peak_memory(CPU) >= before
    assert peak_memory(CPU) > held.numel() * 4
