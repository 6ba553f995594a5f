"""`torch.nn` modules whose forward derivative is fused, with their parameters and state_dict keys."""

import torch
from torch import Tensor, nn

from fullstride.jvp.attention.op import attention
from fullstride.jvp.dual import pack, unpack_all
from fullstride.jvp.functional_norms import as_rows, in_shape_of
from fullstride.jvp.mixed_batch import Batch, MixedBatch
from fullstride.jvp.norms.api import group_norm, layer_norm, rms_norm
from fullstride.jvp.products import along, are_constant, linear
from fullstride.jvp.reroute import reroute_functional
from fullstride.jvp.state import computes_apart, without_own_modes


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` through `group_norm`."""

    def forward(self, input: Batch) -> Batch:  # noqa: A002
        """Normalise each group of channels."""
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    def forward(self, input: Batch) -> Batch:  # noqa: A002
        """Normalise each channel of each sample: group normalisation with a channel to a group."""
        if isinstance(input, MixedBatch) and not self.track_running_stats:
            return group_norm(input, input.shape[1], self.weight, self.bias, self.eps)
        with reroute_functional():
            return super().forward(input)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`nn.InstanceNorm1d` through `group_norm`; with running statistics it is torch's own."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d` through `group_norm`; with running statistics it is torch's own."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d` through `group_norm`; with running statistics it is torch's own."""


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` through `layer_norm`."""

    def forward(self, input: Batch) -> Batch:  # noqa: A002
        """Normalise the last dimensions."""
        rows, *parameters = as_rows(input, self.normalized_shape, self.weight, self.bias)
        return in_shape_of(input, rows, layer_norm(rows, *parameters, eps=self.eps))


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` through `rms_norm`."""

    def forward(self, x: Batch) -> Batch:
        """Normalise the last dimensions."""
        rows, weight = as_rows(x, self.normalized_shape, self.weight)
        return in_shape_of(x, rows, rms_norm(rows, weight, self.eps))


class Linear(nn.Linear):
    """`nn.Linear` whose tangent is one product: torch's own also infers the shape of a zero bias, through Python."""

    def forward(self, input: Batch) -> Batch:  # noqa: A002
        """x W^T + b."""
        return linear(input, self.weight, self.bias)


class _Convolution(nn.modules.conv._ConvNd):
    def forward(self, input: Batch) -> Batch:  # noqa: A002
        """The convolution of primal and tangent, each once."""
        if isinstance(input, MixedBatch):
            return super().forward(input)
        with without_own_modes():
            (x, tangent), *parameters = unpack_all(input, self.weight, self.bias)
            if tangent is not None and computes_apart() and are_constant(parameters):
                out = self._conv_forward(x, self.weight, self.bias)
                return pack(out, along(lambda t: self._conv_forward(t, self.weight, None), tangent))
        return super().forward(input)


class Conv1d(_Convolution, nn.Conv1d):
    """`nn.Conv1d` whose tangent is one convolution."""


class Conv2d(_Convolution, nn.Conv2d):
    """`nn.Conv2d` whose tangent is one convolution."""


class Conv3d(_Convolution, nn.Conv3d):
    """`nn.Conv3d` whose tangent is one convolution."""


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise, then scale and shift: as one op, the compiler cannot differentiate it forwards."""
        with reroute_functional():
            return super().forward(input)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` that compiles under `jvp`."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` that compiles under `jvp`."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` that compiles under `jvp`."""


class MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` through `attention`.

    It runs in elementary operations if it returns its weights, drops some of them out, or has extra keys.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `nn.MultiheadAttention`; if a tangent flows, dropout also works without weights.

        Raises:
            ValueError: if is_causal, which is only a hint about the mask, is given without attn_mask.

        """
        given = query, key, value, key_padding_mask
        if are_constant(unpack_all(*given[:3], *self._parameters.values())):
            return super().forward(*given, need_weights, attn_mask, average_attn_weights, is_causal)
        if need_weights or (self.training and self.dropout > 0) or self.bias_k is not None or self.add_zero_attn:
            out, weights = super().forward(*given, True, attn_mask, average_attn_weights, is_causal)
            return out, weights if need_weights else None
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is given without attn_mask, expected both: it only describes attn_mask")
        return self._fused(*given, attn_mask), None

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
        single, lengths_first = query.ndim == 2, not self.batch_first and query.ndim == 3
        q, k, v = (x[None] if single else x.transpose(0, 1) if lengths_first else x for x in (query, key, value))
        q, k, v = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in self._projected(q, k, v))
        seen = _mask(mask, padding, q.shape[:2], k.shape[2])
        out = attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        out = linear(out, self.out_proj.weight, self.out_proj.bias)
        return out[0] if single else out.transpose(0, 1) if lengths_first else out

    def _projected(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True)]


def _mask(mask: Tensor | None, padding: Tensor | None, heads: tuple[int, ...], keys: int) -> Tensor | None:
    """Both masks of `nn.MultiheadAttention`, in which true hides, as one that is added."""
    masks = []
    if mask is not None:
        masks.append(mask.view(*heads, *mask.shape[1:]) if mask.ndim == 3 else mask)
    if padding is not None:
        masks.append(padding.view(-1, 1, 1, keys))
    if not masks:
        return None
    if all(m.dtype == torch.bool for m in masks):
        return ~torch.stack(torch.broadcast_tensors(*masks)).any(0)
    added = lambda m: torch.zeros(m.shape, device=m.device).masked_fill(m, -torch.inf)  # noqa: E731
    return sum(added(m) if m.dtype == torch.bool else m for m in masks)  # pyright: ignore[reportReturnType]
