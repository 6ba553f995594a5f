"""Norms on explicit pairs of primals and tangents."""

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.jvp.norms import dispatch

Rows = Float[Tensor, "*s d"]
Row = Float[Tensor, " d"]
Samples = Float[Tensor, "b *n d"]
Modulation = Float[Tensor, "b *one d"]
Images = Float[Tensor, "b c *s"]
Channels = Float[Tensor, " c"]


def layer_norm_dual(
    x: Rows,
    weight: Row | None = None,
    bias: Row | None = None,
    tx: Rows | None = None,
    tweight: Row | None = None,
    tbias: Row | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Rows, Rows | None]:
    """`layer_norm` of explicit pairs, for code that carries its tangents itself.

    Args:
        x: rows.
        weight: of the columns; none is one.
        bias: of the columns; none is zero.
        tx: tangent of x; absent, it is zero, and its work is left out.
        tweight: tangent of the weight.
        tbias: tangent of the bias.
        eps: as in `layer_norm`, and so the implementation.
        dtype: of the results; none is x's.
        implementation: `auto`, `fused`, `plain` or `triton`, as in `layer_norm`.
        tangent_grad: whether gradients may be taken through the output's tangent; if not, nothing of it is kept.

    Returns:
        The output and its tangent, None without any tangent given; the output is the library's own op then.

    Raises:
        ValueError: as `layer_norm`, and for a tangent that is not like its primal.

    """
    primals, tangents = (x, weight, bias), (tx, tweight, tbias)
    return dispatch.layer_norm(primals, tangents, eps, dtype, implementation, tangent_grad)


def rms_norm_dual(
    x: Rows,
    weight: Row | None = None,
    tx: Rows | None = None,
    tweight: Row | None = None,
    *,
    eps: float | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Rows, Rows | None]:
    """`rms_norm` of explicit pairs, for code that carries its tangents itself.

    Args:
        x: rows.
        weight: of the columns; none is one.
        tx: tangent of x; absent, it is zero, and its work is left out.
        tweight: tangent of the weight.
        eps: as in `rms_norm`, and so the implementation.
        dtype: of the results; none is x's.
        implementation: `auto`, `fused`, `plain` or `triton`, as in `rms_norm`.
        tangent_grad: whether gradients may be taken through the output's tangent; if not, nothing of it is kept.

    Returns:
        The output and its tangent, None without any tangent given; the output is the library's own op then.

    Raises:
        ValueError: as `rms_norm`, and for a tangent that is not like its primal.

    """
    primals, tangents = (x, weight), (tx, tweight)
    return dispatch.rms_norm(primals, tangents, eps, dtype, implementation, tangent_grad)


def ada_layer_norm_dual(
    x: Samples,
    scale: Modulation,
    shift: Modulation,
    tx: Samples | None = None,
    tscale: Modulation | None = None,
    tshift: Modulation | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Samples, Samples | None]:
    """`ada_layer_norm` of explicit pairs, for code that carries its tangents itself.

    Args:
        x: (B, N, D) or (B, D).
        scale: (B, D) or (B, 1, D).
        shift: likewise.
        tx: tangent of x; absent, it is zero, and its work is left out.
        tscale: tangent of the scale, of its shape.
        tshift: tangent of the shift, of its shape.
        eps: as in `ada_layer_norm`, and so the implementation.
        dtype: of the results; none is x's.
        implementation: `auto`, `fused`, `plain` or `triton`, as in `ada_layer_norm`.
        tangent_grad: whether gradients may be taken through the output's tangent; if not, nothing of it is kept.

    Returns:
        The output and its tangent, None without any tangent given; the output is made of the library's own ops then.

    Raises:
        ValueError: as `ada_layer_norm`, and for a tangent that is not like its primal.

    """
    primals, tangents = (x, scale, shift), (tx, tscale, tshift)
    return dispatch.ada_layer_norm(primals, tangents, eps, dtype, implementation, tangent_grad)


def group_norm_dual(
    x: Images,
    groups: int,
    weight: Channels | None = None,
    bias: Channels | None = None,
    tx: Images | None = None,
    tweight: Channels | None = None,
    tbias: Channels | None = None,
    *,
    eps: float = 1e-5,
    act: str | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Images, Images | None]:
    """`group_norm` of explicit pairs, for code that carries its tangents itself.

    Args:
        x: images (B, C, ...), contiguous or channels_last.
        groups: of the channels, equal ones.
        weight: of the channels; none is one.
        bias: of the channels; none is zero.
        tx: tangent of x; absent, it is zero, and its work is left out.
        tweight: tangent of the weight.
        tbias: tangent of the bias.
        eps: as in `group_norm`, and so the rest.
        act: None, or "silu".
        dtype: of the results; none is x's.
        implementation: `auto`, `fused`, `plain` or `triton`, as in `group_norm`.
        tangent_grad: whether gradients may be taken through the output's tangent; if not, nothing of it is kept.

    Returns:
        The output and its tangent, None without any tangent given; the output is made of the library's own ops then.

    Raises:
        ValueError: as `group_norm`, and for a tangent that is not like its primal.

    """
    primals, tangents = (x, weight, bias), (tx, tweight, tbias)
    return dispatch.group_norm(primals, tangents, groups, eps, act, dtype, implementation, tangent_grad)
