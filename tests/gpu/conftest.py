import pytest
import torch


@pytest.fixture(autouse=True)
def _formats_of_products():
    """What a test or a bench sets for the process is the process's: the next test starts from PyTorch's defaults."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
