"""Parts of every network: sizes and labels, norms, attention over pixels, recomputed blocks, evaluation mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fullstride import jvp
from fullstride.jvp import attention, checkpoint
from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Conv2d


def full_precision(x: Batch) -> Batch:
    """x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _consumed(x: Batch) -> torch.dtype | None:
    """The format in which autocast's products will read a norm's output: written so, it need not be cast there."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def ada_layer_norm(
    x: Float[Batch, "b n d"], scale: Float[Batch, "b 1 d"], shift: Float[Batch, "b 1 d"]
) -> Float[Batch, "b n d"]:
    """(1 + scale) layer_norm(x) + shift (arXiv:2212.09748), computed in fp32 or better."""
    return jvp.ada_layer_norm(x, scale, shift, eps=1e-6, dtype=_consumed(x))


def rms_norm(x: Float[Batch, "*s d"], weight: Float[Tensor, " d"], eps: float = 1e-6) -> Float[Batch, "*s d"]:
    """x / sqrt(mean x^2) * weight (arXiv:1910.07467), computed in fp32 or better, returned in x's own format."""
    return jvp.rms_norm(x, weight, eps, dtype=x.dtype)


# With one channel a group, a shift of the channel before the norm, which is how the times enter, would be erased.
MIN_CHANNELS_A_GROUP = 4


def num_groups(channels: int, most: int = 32) -> int:
    """The largest number of equal groups up to `most` that leaves each at least 4 channels."""
    limit = max(1, min(most, channels // MIN_CHANNELS_A_GROUP))
    return next(g for g in range(limit, 0, -1) if channels % g == 0)


class GroupNorm(nn.Module):
    """`nn.GroupNorm` with the same parameters and state_dict keys, in fp32 or better, with SiLU behind it on demand."""

    def __init__(self, channels: int, groups: int | None = None, eps: float = 1e-5, *, act: str | None = None):
        """Make the norm; `groups` is `num_groups(channels)` unless given, `act` None or "silu"."""
        super().__init__()
        self.groups = groups or num_groups(channels)
        self.eps, self.act = eps, act
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h w"]:
        """Normalise over each group's channels and pixels."""
        settings = {
            "dtype": _consumed(x),
            "implementation": "fused",
        }  # without a tangent, too, faster than the library's
        return jvp.group_norm(x, self.groups, self.weight, self.bias, self.eps, self.act, **settings)


Images = Float[Batch, "b c h w"]
Heads = Float[Batch, "b h n d"]
Labels = Int[Tensor, " b"] | None


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


def as_tokens(x: Float[Batch, "b c h w"]) -> Float[Batch, "b n c"]:
    """One token a pixel; a view, and of an image in channels_last a contiguous one."""
    return x.flatten(2).transpose(1, 2)


def patches(z: Float[Batch, "b c h w"], size: int) -> Float[Batch, "b n p"]:
    """Squares of `size` x `size` pixels, each as the row, column and channel of its pixels, in this order."""
    return z.unflatten(3, (-1, size)).unflatten(2, (-1, size)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def from_patches(x: Float[Batch, "b n p"], like: Float[Batch, "b d h w"], size: int) -> Float[Batch, "b c h w"]:
    """The inverse of `patches`, with as many rows and columns as `like`."""
    squares = x.unflatten(2, (size, size, -1)).unflatten(1, (like.shape[2] // size, -1))
    return squares.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def as_image(tokens: Float[Batch, "b n c"], like: Float[Batch, "b d h w"]) -> Float[Batch, "b c h w"]:
    """The pixels of tokens, as many as another image has; of contiguous tokens a view in channels_last."""
    return tokens.transpose(1, 2).unflatten(2, like.shape[2:])


def queries_keys_values(x: Float[Batch, "b n c"], heads: int) -> tuple[Heads, Heads, Heads]:
    """Queries, keys and values of each head, out of one projection whose columns are (3, heads, d).

    They are taken apart as they lie: their gradients are joined in this order, and copied again from any other.
    """
    q, k, v = (part.transpose(1, 2) for part in x.unflatten(-1, (3, heads, -1)).unbind(2))
    return q, k, v


class SelfAttention2d(nn.Module):
    """Multi-head self-attention over the pixels of a feature map, with its norm and residual."""

    def __init__(self, channels: int, head_channels: int = 64):
        """Make the block; the last projection starts at zero, so the block starts as the identity."""
        super().__init__()
        self.heads = max(1, channels // head_channels)
        if channels % self.heads:
            raise ValueError(f"channels is {channels}, expected a multiple of the {self.heads} heads")
        self.norm = GroupNorm(channels)
        self.qkv = Conv2d(channels, 3 * channels, 1)
        self.out = zero_init(Conv2d(channels, channels, 1))

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h w"]:
        """x + attention over the h * w pixels."""
        q, k, v = queries_keys_values(as_tokens(self.qkv(self.norm(x))), self.heads)
        return x + self.out(as_image(attention(q, k, v).transpose(1, 2).flatten(2), x))


def through(block: nn.Module, *args: Batch) -> Batch:
    """block(*args); where `recompute` marked the block, only its arguments are kept."""
    return checkpoint(block, *args) if getattr(block, "recompute", False) else block(*args)


def recompute(model: nn.Module) -> int:
    """Mark the blocks that can be computed anew, and return how many there are."""
    blocks = [m for m in model.modules() if hasattr(m, "recompute")]
    for block in blocks:
        block.recompute = True  # pyright: ignore[reportArgumentType]
    return len(blocks)
