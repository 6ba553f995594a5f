"""The diffusion transformer of the average velocity u(z, r, t): patches, adaLN-zero blocks (arXiv:2212.09748).

Conditioned on t, t - r and the class, whose embeddings add up, as the MeanFlow paper does (arXiv:2505.13447). With
`decoupled_blocks` (arXiv:2510.24474) the first blocks see t, as an encoder of z, and the last r, as a decoder of the
average velocity. At r = t that is the same function of the same weights, so a trained flow is a start for it.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp import attention
from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Linear
from fullstride.meanflow.models.common import (
    Images,
    Labels,
    ada_layer_norm,
    class_vector,
    from_patches,
    full_precision,
    patches,
    queries_keys_values,
    rms_norm,
    through,
    zero_init,
)

TIME_FEATURES = 256
LONGEST_PERIOD = 10_000.0  # of the sines of times, in units of t, and of places, in patches; both over 2 pi
EMBEDDING_STD = 0.02


def wave_frequencies(count: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Float[Tensor, " f"]:
    """`count` frequencies falling geometrically from 1 towards 1 / 10,000 radians."""
    octave = torch.arange(count, dtype=dtype, device=device) / count
    return torch.exp(-math.log(LONGEST_PERIOD) * octave)


def waves(x: Float[Batch, "*s"], count: int) -> tuple[Float[Batch, "*s f"], Float[Batch, "*s f"]]:
    """sin and cos of x at `wave_frequencies`."""
    angle = x[..., None] * wave_frequencies(count, x.dtype, x.device)
    return angle.sin(), angle.cos()


def position_embedding(side: int, width: int) -> Float[Tensor, "n d"]:
    """Fixed embedding of a side x side grid of patches, row by row; fp64.

    The first half of the `width` numbers tells the column, the second the row, each as sines and then cosines.
    """
    row, column = torch.meshgrid(*[torch.arange(side, dtype=torch.float64)] * 2, indexing="ij")
    parts = [wave for place in (column, row) for wave in waves(place.flatten(), width // 4)]
    return torch.cat(parts, dim=1)


def glorot_linear(features: int, out: int, std: float | None = None) -> nn.Linear:
    """A linear layer that starts without bias: weights N(0, std^2), or uniform by Glorot's rule."""
    layer = Linear(features, out)
    nn.init.zeros_(layer.bias)
    if std is None:
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.normal_(layer.weight, std=std)
    return layer


class TimeMlp(nn.Module):
    """128 cosines and 128 sines of a time, through two linear layers with SiLU between."""

    def __init__(self, width: int, scale: float = 1.0):
        """Make the perceptron; `scale` is what times are multiplied by first."""
        super().__init__()
        self.scale = scale
        self.hidden = glorot_linear(TIME_FEATURES, width, EMBEDDING_STD)
        self.out = glorot_linear(width, width, EMBEDDING_STD)

    def forward(self, time: Float[Batch, " b"]) -> Float[Batch, "b d"]:
        """Embed each time: the fastest wave turns by `scale` radians a unit of t."""
        time = full_precision(time)
        sin, cos = waves(time if self.scale == 1 else time * self.scale, TIME_FEATURES // 2)
        return self.out(F.silu(self.hidden(torch.cat([cos, sin], dim=1))))


class Conditioning(nn.Module):
    """The vector that conditions every block: embeddings of t, of t - r and of the class, summed."""

    def __init__(self, width: int, num_classes: int, time_scale: float = 1.0):
        """Make the layers; `num_classes` 0 is unconditional, else one more embedding stands for 'no class'."""
        super().__init__()
        self.time, self.gap = TimeMlp(width, time_scale), TimeMlp(width, time_scale)
        self.label = nn.Embedding(num_classes + 1, width) if num_classes else None
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=EMBEDDING_STD)

    def forward(self, r: Float[Tensor, " b"], t: Float[Batch, " b"], label: Labels) -> Float[Batch, "b d"]:
        """Embed (t, t - r) and the label, where None means 'no class'; never in half precision.

        Raises:
            ValueError: for a label when there are no classes.

        """
        # du/dt is the derivative of this vector carried on: rounded to bf16 it would be a staircase in t.
        with torch.autocast(t.device.type, enabled=False):
            return self.time(t) + self.gap(t - r) + class_vector(self.label, label, r)

    def at(self, time: Float[Batch, " b"], r: Float[Tensor, " b"], label: Labels) -> Float[Batch, "b d"]:
        """Embed one time and the label, as `forward` does where r and t are this time; r tells the device alone."""
        with torch.autocast(r.device.type, enabled=False):
            return self.time(time) + self.gap(torch.zeros_like(r)) + class_vector(self.label, label, r)


class Modulation(nn.Module):
    """`count` vectors out of the conditioning, zero at first: the shifts, scales and gates of adaLN-zero."""

    def __init__(self, width: int, count: int):
        """Make it."""
        super().__init__()
        self.count = count
        self.linear = zero_init(Linear(width, count * width))

    def forward(self, conditioning: Float[Batch, "b d"]) -> tuple[Float[Batch, "b 1 d"], ...]:
        """One vector for all tokens of a sample, `count` times."""
        return self.linear(F.silu(conditioning))[:, None].chunk(self.count, dim=-1)


class SelfAttention(nn.Module):
    """Multi-head self-attention over tokens."""

    def __init__(self, width: int, heads: int, qk_norm: bool):
        """Make it; `qk_norm` normalises each head's queries and keys, which bounds the logits (arXiv:2302.05442)."""
        super().__init__()
        self.heads = heads
        self.qkv, self.out = glorot_linear(width, 3 * width), glorot_linear(width, width)
        self.qk_weight = nn.Parameter(torch.ones(2, width // heads)) if qk_norm else None

    def forward(self, x: Float[Batch, "b n d"]) -> Float[Batch, "b n d"]:
        """Mix the tokens."""
        q, k, v = queries_keys_values(self.qkv(x), self.heads)
        if self.qk_weight is not None:
            q, k = rms_norm(q, self.qk_weight[0]), rms_norm(k, self.qk_weight[1])
        return self.out(attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a perceptron, each behind a modulated norm and with a gate on its residual branch."""

    recompute = False

    def __init__(self, width: int, heads: int, mlp_ratio: float, qk_norm: bool):
        """Make the block; the gates start at zero, so the block starts as the identity."""
        super().__init__()
        hidden = int(mlp_ratio * width)
        self.modulation = Modulation(width, 6)
        self.attention = SelfAttention(width, heads, qk_norm)
        first, last = glorot_linear(width, hidden), glorot_linear(hidden, width)
        self.mlp = nn.Sequential(first, nn.GELU(approximate="tanh"), last)

    def forward(self, x: Float[Batch, "b n d"], conditioning: Float[Batch, "b d"]) -> Float[Batch, "b n d"]:
        """Two residual steps."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(conditioning)
        x = x + gate1 * self.attention(ada_layer_norm(x, scale1, shift1))
        return x + gate2 * self.mlp(ada_layer_norm(x, scale2, shift2))


class DiT(nn.Module):
    """u(z, r, t) by a transformer over the patches of a square image or latent."""

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        *,
        patch_size: int = 2,  # pixels a side of a patch; one token each
        width: int = 768,
        depth: int = 12,  # blocks
        heads: int = 12,
        mlp_ratio: float = 4.0,  # hidden width of the perceptrons in units of `width`
        qk_norm: bool = False,  # see SelfAttention
        decoupled_blocks: int = 0,  # last blocks that see r alone, the others t alone; 0: each sees t and t - r
        time_scale: float = 1.0,  # see TimeMlp
        num_classes: int = 0,  # 0: unconditional
    ):
        """Make the network for square images of `image_size`; its output starts at zero.

        Raises:
            ValueError: if `image_size` is no multiple of `patch_size`, or `width` none of 4 and of `heads`, or all
                blocks are to be decoupled.

        """
        super().__init__()
        if image_size % patch_size:
            raise ValueError(
                f"image_size is {image_size}, expected a multiple of patch_size, {patch_size}; "
                "choose another patch_size or resize the images"
            )
        if width % heads or width % 4:
            raise ValueError(f"width is {width}, expected a multiple of 4 and of the {heads} heads")
        if not 0 <= decoupled_blocks < depth:
            raise ValueError(f"decoupled_blocks is {decoupled_blocks}, expected 0 to {depth - 1} of {depth} blocks")
        self.decoupled_blocks = decoupled_blocks
        self.image_size, self.patch_size = image_size, patch_size
        self.time_scale = time_scale
        patch = in_channels * patch_size**2
        position = position_embedding(image_size // patch_size, width)
        self.register_buffer("position", position.to(torch.get_default_dtype()), persistent=False)
        self.position: Tensor
        self.patch_in = glorot_linear(patch, width)
        self.conditioning = Conditioning(width, num_classes, time_scale)
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio, qk_norm) for _ in range(depth))
        self.modulation_out = Modulation(width, 2)
        self.patch_out = zero_init(Linear(width, patch))

    def forward(self, z: Images, r: Float[Tensor, " b"], t: Float[Batch, " b"], label: Labels = None) -> Images:
        """The average velocity over [r, t] of the path through z at time t.

        Raises:
            ValueError: if z is not as high and wide as the network was made for.

        """
        if z.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"images are {z.shape[2]}x{z.shape[3]}, expected {self.image_size}x{self.image_size}; "
                "make the network with their image_size, or pad or crop them to a square of it"
            )
        if self.decoupled_blocks:
            early, late = self.conditioning.at(t, r, label), self.conditioning.at(r, r, label)
        else:
            early = late = self.conditioning(r, t, label)
        x = self.patch_in(patches(z, self.patch_size)) + self.position
        for number, block in enumerate(self.blocks, self.decoupled_blocks - len(self.blocks)):
            x = through(block, x, early if number < 0 else late)
        shift, scale = self.modulation_out(late)
        return from_patches(self.patch_out(ada_layer_norm(x, scale, shift)), z, self.patch_size)
