"""The arithmetic of a call, counted from the operations that PyTorch makes."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Operations that multiply matrices internally, so that their sizes cannot be seen.
HIDDEN = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_trilinear")
HIDDEN += ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")


def count_flops(call: Callable[[], Any]) -> int:
    """Operations of matrix products, convolutions and attention in a call, 2 a multiply-add, backward included.

    Forward derivatives count products with zero tangents too: count the primal, and derive what the tangent must add.

    Raises:
        ValueError: if there are none, since a compiled function hides them and its roofline bound would be 0; or for an
            operation whose products cannot be seen.

    """
    from torch.utils.flop_counter import FlopCounterMode

    with _no_fast_path(), FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        call()
    if not (total := counter.get_total_flops()):
        raise ValueError("counted no operation; expected matrix products, convolutions or attention in an eager call")
    return total


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Disable PyTorch's fused layers, which it uses in eval mode."""
    from torch.backends import mha

    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOP formulas that PyTorch's own table lacks or has wrong, by operation; shapes stand for tensors."""
    from torch import ops
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    aten = ops.aten
    product = lambda _, a, b, **__: 2 * math.prod(a) * b[-1]  # noqa: E731
    formulas: dict[Any, Callable[..., int]] = {
        aten.mv: lambda a, b, **_: 2 * math.prod(a),
        aten.addmv: lambda _, a, b, **__: 2 * math.prod(a),
        aten.dot: lambda a, b, **_: 2 * math.prod(a),
        aten.addmm_: product,
        aten.baddbmm_: product,
        aten.convolution_backward: _convolution_backward,
        # Fused attention on a CPU counts as it does on a GPU.
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *given, **_: sdpa_flop_count(*given[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *given, **_: sdpa_backward_flop_count(
            *given[:4]
        ),
    }
    return formulas | {getattr(aten, name): _refusing(name) for name in HIDDEN}


def _convolution_backward(
    grad: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
    **_: Any,
) -> int:
    """Count the forward pass once per gradient needed (images, weights); PyTorch's own formula ignores groups."""
    from torch.utils.flop_counter import conv_flop_count

    return sum(wanted[:2]) * conv_flop_count(list(x), list(weight), list(grad), transposed=transposed)


def _refusing(name: str) -> Callable[..., int]:
    def refuse(*_: Any, **__: Any) -> int:
        raise ValueError(
            f"aten.{name} multiplies matrices that cannot be counted; write the call with products, convolutions and "
            "attention, or count it by hand"
        )

    return refuse
