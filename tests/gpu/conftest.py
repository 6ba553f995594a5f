import os
import sys

import pytest
import torch

# JAX would take three quarters of the GPU where the first of its tests is collected, and PyTorch and others need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Dynamo cannot trace through checks of types: GPU tests that are run by themselves go without.
if "fullstride" not in sys.modules:
    sys.meta_path[:] = [finder for finder in sys.meta_path if "jaxtyping" not in type(finder).__module__]


@pytest.fixture(autouse=True)
def _formats_of_products():
    """Reset the process-wide formats of products: each test starts from PyTorch's defaults."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
