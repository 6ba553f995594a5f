"""Exact, fused forward-mode derivatives (JVPs) of attention and norms, for any PyTorch model."""

from fullstride.jvp.attention.op import attention, attention_dual
from fullstride.jvp.attention.op_varlen import attention_varlen, document_starts
from fullstride.jvp.checking.tangents import TangentError, TangentReport, check_tangents
from fullstride.jvp.checkpointing import checkpoint
from fullstride.jvp.mixed_transform import partial_jvp
from fullstride.jvp.norms.api import (
    ada_layer_norm,
    ada_layer_norm_dual,
    group_norm,
    group_norm_dual,
    layer_norm,
    layer_norm_dual,
    rms_norm,
    rms_norm_dual,
)
from fullstride.jvp.prepare import Prepared, prepare
from fullstride.jvp.transform import jvp

__all__ = [
    "Prepared",
    "TangentError",
    "TangentReport",
    "ada_layer_norm",
    "ada_layer_norm_dual",
    "attention",
    "attention_dual",
    "attention_varlen",
    "check_tangents",
    "checkpoint",
    "document_starts",
    "group_norm",
    "group_norm_dual",
    "jvp",
    "layer_norm",
    "layer_norm_dual",
    "partial_jvp",
    "prepare",
    "rms_norm",
    "rms_norm_dual",
]
