"""A diffusion transformer for samples of any rank: rows of a table, sounds, pictures, films."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Linear
from fullstride.meanflow.models.common import Labels, ada_layer_norm, through, zero_init
from fullstride.meanflow.models.dit import Block, Conditioning, Modulation, glorot_linear, waves


def axis_positions(sizes: Sequence[int], width: int) -> Float[Tensor, "n d"]:
    """Fixed embedding of a grid of places, the last axis fastest; fp64.

    Each axis has an equal share of the `width` numbers, as sines and then cosines; what is left over is zero.
    """
    if not sizes:
        return torch.zeros(1, width, dtype=torch.float64)
    grid = torch.meshgrid(*[torch.arange(n, dtype=torch.float64) for n in sizes], indexing="ij")
    count = width // (2 * len(sizes))
    parts = [wave for place in grid for wave in waves(place.flatten(), count)]
    return torch.cat([*parts, parts[0].new_zeros(len(parts[0]), width - count * len(parts))], dim=1)


class TokenDiT(nn.Module):
    """u(z, r, t) by a transformer whose tokens are the patches of a sample, with the blocks of `DiT`.

    A sample (c, n1, n2, ...) has a token for each patch of p1 x p2 x ... places. One of a single dimension, such as a
    row of a table, is one token: then the blocks are perceptrons with a conditioned norm.

    A condition is a vector, which is embedded and added to the embedded times, or a sequence of vectors, which become
    tokens behind the sample's own, whose outputs are left out.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int | Sequence[int],
        *,
        patch_sizes: Sequence[int] = (1,),  # length of a patch along each axis, or one number for all
        width: int = 256,
        depth: int = 6,  # blocks
        heads: int = 4,
        mlp_ratio: float = 4.0,  # hidden width of the perceptrons in units of `width`
        qk_norm: bool = False,  # normalize queries and keys
        num_classes: int = 0,  # 0: unconditional
        condition_shape: Sequence[int] = (),  # of a condition: (length,), or (tokens, length) of a sequence
    ):
        """Make the network for samples (in_channels, *image_size), or square pictures; its output starts at zero.

        Raises:
            ValueError: if an axis is no multiple of its patch, or `width` none of `heads`.

        """
        super().__init__()
        self.sizes = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self.patches = tuple(patch_sizes) * len(self.sizes) if len(patch_sizes) == 1 else tuple(patch_sizes)
        self.channels = in_channels
        if len(self.patches) != len(self.sizes) or any(n % p for n, p in zip(self.sizes, self.patches, strict=True)):
            raise ValueError(
                f"patch_sizes are {list(patch_sizes)} for samples of {in_channels} x {self.sizes}, expected a divisor "
                "of each axis after the first, or one number that divides all"
            )
        if width % heads:
            raise ValueError(f"width is {width}, expected a multiple of the {heads} heads")
        self.grid = tuple(n // p for n, p in zip(self.sizes, self.patches, strict=True))
        numbers = in_channels * int(torch.Size(self.patches).numel())
        dtype = torch.get_default_dtype()
        self.register_buffer("position", axis_positions(self.grid, width).to(dtype), persistent=False)
        self.position: Tensor
        self.patch_in = glorot_linear(numbers, width)
        self.conditioning = Conditioning(width, num_classes)
        self.condition_shape = tuple(condition_shape)
        self.condition_in = glorot_linear(self.condition_shape[-1], width) if self.condition_shape else None
        tokens = self.condition_shape[:-1]
        self.register_buffer("order", axis_positions(tokens, width).to(dtype), persistent=False)
        self.order: Tensor
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio, qk_norm) for _ in range(depth))
        self.modulation_out = Modulation(width, 2)
        self.patch_out = zero_init(Linear(width, numbers))

    def forward(
        self,
        z: Float[Batch, "b *s"],
        r: Float[Tensor, " b"],
        t: Float[Batch, " b"],
        label: Labels = None,
        condition: Float[Tensor, "b *k"] | None = None,
    ) -> Float[Batch, "b *s"]:
        """The average velocity over [r, t] of the path through z at time t.

        Raises:
            ValueError: if z or the condition is not of the shape that the network was made for.

        """
        if tuple(z.shape[1:]) != (self.channels, *self.sizes):
            raise ValueError(
                f"samples are {tuple(z.shape[1:])}, expected {(self.channels, *self.sizes)}; make the network for "
                "their shape"
            )
        conditioning, given = self.conditioning(r, t, label), self._condition(condition)
        x = self.patch_in(self._tokens(z)) + self.position
        own = x.shape[1]
        if given is not None and given.ndim == 2:
            conditioning = conditioning + given
        elif given is not None:
            x = torch.cat([x, given], dim=1)
        for block in self.blocks:
            x = through(block, x, conditioning)
        shift, scale = self.modulation_out(conditioning)
        return self._sample(self.patch_out(ada_layer_norm(x[:, :own], scale, shift)))

    def _condition(self, given: Tensor | None) -> Tensor | None:
        """The embedded condition: (b, width) of a vector, (b, tokens, width) of a sequence."""
        if (() if given is None else tuple(given.shape[1:])) != self.condition_shape:
            found = "none" if given is None else f"of shape {tuple(given.shape[1:])}"
            raise ValueError(
                f"conditions are {found}, expected {self.condition_shape or 'none'}, as the network was made for"
            )
        if given is None or self.condition_in is None:
            return None
        embedded = self.condition_in(given)
        return embedded if embedded.ndim == 2 else embedded + self.order

    def _tokens(self, z: Float[Batch, "b *s"]) -> Float[Batch, "b n p"]:
        """Each patch as its places, row by row, and the channels of each."""
        axes = len(self.sizes)
        if axes == 0:
            return z[:, None]
        for axis in reversed(range(axes)):  # (b, c, n1, p1, n2, p2, ...)
            z = z.unflatten(2 + axis, (self.grid[axis], self.patches[axis]))
        grid, inside = [2 + 2 * i for i in range(axes)], [3 + 2 * i for i in range(axes)]
        return z.permute(0, *grid, *inside, 1).flatten(1 + axes).flatten(1, axes)

    def _sample(self, x: Float[Batch, "b n p"]) -> Float[Batch, "b *s"]:
        """The inverse of `_tokens`."""
        axes = len(self.sizes)
        if axes == 0:
            return x[:, 0]
        x = x.unflatten(2, (*self.patches, self.channels)).unflatten(1, self.grid)
        pairs = [place for i in range(axes) for place in (1 + i, 1 + axes + i)]
        x = x.permute(0, 1 + 2 * axes, *pairs)  # (b, c, n1, p1, n2, p2, ...)
        for axis in range(axes):
            x = x.flatten(2 + axis, 3 + axis)
        return x
