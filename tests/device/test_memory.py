import pytest
import torch

from fullstride.device.memory import peak_memory, too_large
from fullstride.errors import is_out_of_memory

CPU = torch.device("cpu")


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_what_takes_less_is_of_as_many_images_and_leaves_two_to_each_process():
    assert "data.batch_size=96 gradient_accumulation_steps=6 takes less" in too_large(192, 3, 1, CPU)
    assert "data.batch_size=15 gradient_accumulation_steps=3 takes less" in too_large(45, 1, 3, CPU)
    assert "data.batch_size=2 gradient_accumulation_steps=2 takes less" in too_large(4, 1, 1, CPU)
    assert "choose a smaller model" in too_large(4, 1, 2, CPU)


def test_the_peak_grows_with_what_is_held():
    before = peak_memory(CPU)
    held = torch.ones(64 * 2**20)
    assert peak_memory(CPU) >= before
    assert peak_memory(CPU) > held.numel() * 4
