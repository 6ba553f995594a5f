"""The transformer of improved MeanFlow (arXiv:2512.02012): u, and a head for v, conditioned by tokens in context.

The class, the guidance scale with its interval, and t - r are tokens in front of the patches; nothing modulates the
blocks. They have RMS norms, rotary positions (arXiv:2104.09864), normalised queries and keys, SwiGLU (arXiv:2002.05202)
and a gate for each feature, zero at first. t itself is not given: z tells it (arXiv:2502.13129).
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
    from_patches,
    full_precision,
    patches,
    queries_keys_values,
    rms_norm,
    through,
    zero_init,
)
from fullstride.meanflow.models.dit import LONGEST_PERIOD, TIME_FEATURES, waves

BLOCK_STD = 0.32  # of a block's weights, times the root of their inputs
CLASS_TOKENS, SCALE_TOKENS, INTERVAL_TOKENS, TIME_TOKENS = 8, 4, 2, 4


def _linear(features: int, out: int, std: float, *, bias: bool = False) -> nn.Linear:
    layer = Linear(features, out, bias=bias)
    nn.init.normal_(layer.weight, std=std / math.sqrt(features))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rotated(x: Float[Batch, "b h n d"]) -> Float[Batch, "b h n d"]:
    """Queries or keys turned by their place in the sequence: features i and i + d/2 as a point in the plane."""
    n, half = x.shape[2], x.shape[3] // 2
    place = torch.arange(n, device=x.device, dtype=torch.float32)
    octave = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = place[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * octave)
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = full_precision(x).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Tokens(nn.Module):
    """`count` learned tokens, to each of which the embedding of a sample's number is added."""

    def __init__(self, width: int, count: int):
        """Make the tokens and the perceptron of the number."""
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(count, width) / math.sqrt(width))
        self.hidden = _linear(TIME_FEATURES, width, 1.0, bias=True)
        self.out = _linear(width, width, 1.0, bias=True)

    def forward(self, x: Float[Batch, " b"]) -> Float[Batch, "b k d"]:
        """Embed a number of each sample."""
        sin, cos = waves(full_precision(x), TIME_FEATURES // 2)
        return self.tokens[None] + self.out(F.silu(self.hidden(torch.cat([cos, sin], dim=1))))[:, None]


class Block(nn.Module):
    """Attention, then SwiGLU, each behind an RMS norm and with a gate on its residual branch."""

    recompute = False

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        """Make the block; the gates start at zero, so the block starts as the identity."""
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.heads = heads
        self.norm = nn.Parameter(torch.ones(2, width))
        self.qk_norm = nn.Parameter(torch.ones(2, width // heads))
        self.gates = nn.Parameter(torch.zeros(2, width))
        self.qkv, self.out = _linear(width, 3 * width, BLOCK_STD), _linear(width, width, BLOCK_STD)
        self.gated, self.linear = _linear(width, hidden, BLOCK_STD), _linear(width, hidden, BLOCK_STD)
        self.down = _linear(hidden, width, BLOCK_STD)

    def forward(self, x: Float[Batch, "b n d"]) -> Float[Batch, "b n d"]:
        """Two residual steps."""
        x = x + self._attended(rms_norm(x, self.norm[0])) * self.gates[0]
        y = rms_norm(x, self.norm[1])
        return x + self.down(F.silu(self.gated(y)) * self.linear(y)) * self.gates[1]

    def _attended(self, x: Float[Batch, "b n d"]) -> Float[Batch, "b n d"]:
        q, k, v = queries_keys_values(self.qkv(x), self.heads)
        q, k = rotated(rms_norm(q, self.qk_norm[0])), rotated(rms_norm(k, self.qk_norm[1]))
        return self.out(attention(q, k, v).transpose(1, 2).flatten(2))


class Head(nn.Module):
    """The last blocks of u or of v, and the way back to patches, which starts at zero."""

    def __init__(self, width: int, blocks: int, heads: int, mlp_ratio: float, patch: int):
        """Make the blocks and the last layer."""
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio) for _ in range(blocks))
        self.norm = nn.Parameter(torch.ones(width))
        self.patch_out = zero_init(Linear(width, patch))

    def forward(self, x: Float[Batch, "b n d"], first: int) -> Float[Batch, "b m p"]:
        """The patches, which are the tokens from `first` on."""
        for block in self.blocks:
            x = through(block, x)
        return self.patch_out(rms_norm(x[:, first:], self.norm))


class MiT(nn.Module):
    """u(z, r, t), and v(z, t) where asked for, by a transformer over tokens and the patches of a square image."""

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        *,
        patch_size: int = 2,  # pixels a side of a patch; one token each
        width: int = 768,
        depth: int = 12,  # blocks that u goes through
        heads: int = 12,
        head_blocks: int = 8,  # the last of them, which v has of its own
        mlp_ratio: float = 8 / 3,  # hidden width of the perceptrons in units of `width`
        num_classes: int = 0,  # 0: unconditional, and without guidance
    ):
        """Make the network for square images of `image_size`; its outputs start at zero.

        Raises:
            ValueError: if `image_size` is no multiple of `patch_size`, `width` none of twice the heads, or a head has
                no blocks or more than `depth`.

        """
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size is {image_size}, expected a multiple of patch_size, {patch_size}")
        if width % (2 * heads):
            raise ValueError(f"width is {width}, expected a multiple of twice the {heads} heads")
        if not 1 <= head_blocks <= depth:
            raise ValueError(f"head_blocks is {head_blocks}, expected 1 to {depth}, the depth")
        self.image_size = image_size
        self.patch_size = patch_size
        self.num_classes = num_classes
        patch = in_channels * patch_size**2
        self.patch_in = Linear(patch, width)
        nn.init.xavier_uniform_(self.patch_in.weight)
        nn.init.zeros_(self.patch_in.bias)
        self.gap = Tokens(width, TIME_TOKENS)
        if num_classes:
            self.scale = Tokens(width, SCALE_TOKENS)
            self.start = Tokens(width, INTERVAL_TOKENS)
            self.end = Tokens(width, INTERVAL_TOKENS)
            self.label = nn.Embedding(num_classes + 1, width)
            nn.init.normal_(self.label.weight, std=1 / math.sqrt(width))
            self.label_tokens = nn.Parameter(torch.randn(CLASS_TOKENS, width) / math.sqrt(width))
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio) for _ in range(depth - head_blocks))
        self.u, self.v = (Head(width, head_blocks, heads, mlp_ratio, patch) for _ in range(2))

    def forward(
        self,
        z: Images,
        r: Float[Tensor, " b"],
        t: Float[Batch, " b"],
        label: Labels = None,
        omega: Float[Tensor, " b"] | None = None,
        start: Float[Tensor, " b"] | None = None,
        end: Float[Tensor, " b"] | None = None,
        *,
        both: bool = False,
    ) -> Float[Batch, "b d h w"]:
        """The average velocity over [r, t] of the guided flow through z at time t.

        Args:
            z: images.
            r: the earlier times.
            t: the later times.
            label: classes; None and the last one are 'no class'.
            omega: guidance scale of each sample; 1, no guidance, unless given.
            start: the scale holds for times in [start, end]; 0 and 1 unless given.
            end: see `start`.
            both: whether v follows u along the channels.

        Raises:
            ValueError: if z is not as high and wide as the network was made for, or a network without classes is given
                a label or guidance.

        """
        if z.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"images are {z.shape[2]}x{z.shape[3]}, expected {self.image_size}x{self.image_size}; "
                "make the network with their image_size, or pad or crop them to a square of it"
            )
        front = self._context(r, t, label, omega, start, end)
        x = torch.cat([*front, self.patch_in(patches(z, self.patch_size))], dim=1)
        first = sum(tokens.shape[1] for tokens in front)
        for block in self.blocks:
            x = through(block, x)
        u = from_patches(self.u(x, first), z, self.patch_size)
        return torch.cat([u, from_patches(self.v(x, first), z, self.patch_size)], dim=1) if both else u

    def _context(
        self,
        r: Float[Tensor, " b"],
        t: Float[Batch, " b"],
        label: Labels,
        omega: Tensor | None,
        start: Tensor | None,
        end: Tensor | None,
    ) -> list[Float[Batch, "b k d"]]:
        """The tokens in front of the patches, never in half precision."""
        if not self.num_classes and any(x is not None for x in (label, omega, start, end)):
            raise ValueError(
                "a label or guidance was given to an unconditional network; set model.class_conditional=true"
            )
        with torch.autocast(r.device.type, enabled=False):
            if not self.num_classes:
                return [self.gap(t - r)]
            one = torch.ones_like(r)
            none = torch.full_like(r, self.num_classes, dtype=torch.long)
            named = self.label_tokens[None] + self.label(none if label is None else label)[:, None]
            scale = self.scale(1 - 1 / (one if omega is None else omega))
            begin, until = self.start(0 * one if start is None else start), self.end(one if end is None else end)
            return [named, scale, begin, until, self.gap(t - r)]
