"""Memory layout of a norm's results: one rule for kernels, PyTorch operations and the compiler's shapes."""

import torch
from torch import Tensor

from fullstride.jvp.mixed_batch import Batch


def row_major(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of x's shape, row by row, however x lies: views, expanded and sliced tensors, too."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def over_pixels(shift: Batch, x: Batch) -> Batch:
    """A number for each channel of each sample, in a shape that broadcasts to that of the images x."""
    return shift[(..., *[None] * (x.ndim - 2))]


def format_of(x: Tensor) -> torch.memory_format:
    """Memory format in which images are processed: channels_last if they have it, else row-major."""
    if not x.is_contiguous():
        for layout, dim in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if x.dim() == dim and x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


def images_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of x's shape in its `format_of`."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device, memory_format=format_of(x))
