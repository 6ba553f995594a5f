"""Parts of every network: its sizes, its labels, layers that start as zero, evaluation mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def check_halvings(image_size: int, levels: int) -> None:
    """Check that a feature map can be halved once between levels.

    Raises:
        ValueError: if it cannot.

    """
    factor = 2 ** (levels - 1)
    if image_size % factor:
        raise ValueError(
            f"image_size is {image_size}, expected a multiple of {factor}: "
            f"channel_mult has {levels} levels; use fewer levels or pad the images"
        )


def class_vector(
    table: nn.Embedding | None, label: Int[Tensor, " b"] | None, like: Float[Tensor, " b"]
) -> Float[Tensor, "..."]:
    """The embedding of each label, whose last row stands for 'no class', as no label does; 0 without a table.

    Args:
        table: num_classes + 1 embeddings, or None for an unconditional network.
        label: classes.
        like: one number a sample, for their count and device.

    Raises:
        ValueError: for a label when there is no table.

    """
    if table is None:
        if label is not None:
            raise ValueError("a label was given to an unconditional network; set model.class_conditional=true")
        return like.new_zeros(())
    none = torch.full_like(like, table.num_embeddings - 1, dtype=torch.long)
    return table(none if label is None else label)


L = TypeVar("L", nn.Conv2d, nn.Linear)


def zero_init(layer: L) -> L:
    """The layer with weight and bias 0, so that a residual branch starts as nothing."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@contextmanager
def evaluating(model: Callable[..., Tensor]) -> Iterator[None]:
    """Eval mode for the model and everything in it; afterwards each module's own mode again, error or not."""
    modes = {m: m.training for m in model.modules()} if isinstance(model, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
