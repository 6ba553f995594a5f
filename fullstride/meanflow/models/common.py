"""What every network does with its sizes and its labels."""

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
