"""Work of a forward pass, counted on meta tensors (shapes without data): nothing is allocated or computed.

Eager operations are counted. What a compiler makes of them is part of the fitted costs (`cost.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import ModelConfig
from fullstride.meanflow.planning.cost import NetworkWork
from fullstride.meanflow.training.build import build_model

aten: Any = torch.ops.aten
CONVOLUTIONS, PRODUCTS = {aten.convolution}, {aten.addmm, aten.mm}
NORMS = {aten.native_group_norm, aten.native_layer_norm}
FLASH = {aten._scaled_dot_product_flash_attention_for_cpu}
SOFTMAX = {aten._safe_softmax, aten._softmax}
# Attention written out, where the fused form does not take the memory order.
BATCHED = {aten.bmm}
# Their outputs are other tensors' memory, or copies that a GPU's kernels do not need.
FREE = {aten._to_copy, aten.clone, aten._unsafe_view}
BATCH = 7  # no layer is as wide as a multiple of it, so that casts of weights are told apart by their shapes


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@dataclass
class _Counted(TorchDispatchMode):
    """Watches every operation.

    Attributes:
        narrow: by memory of a widened copy, what it was made of: a kernel reads that.
        dropped: memory that a fused kernel never writes.
        alive: every tensor seen, so that no memory is used twice.

    """

    calls: float = 0.0
    flash: float = 0.0
    norms: float = 0.0
    pointwise: float = 0.0
    narrow: dict[int, Tensor] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    normed: set[int] = field(default_factory=set)
    alive: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start watching when entered."""
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.alive += made
        if read and made and not func.is_view:
            self._count(func.overloadpacket, read, made)
        return out

    def _count(self, kind: Any, read: list[Tensor], made: list[Tensor]) -> None:
        first, result = read[0], made[0]
        if kind is aten._to_copy and first.element_size() < result.element_size():
            self.narrow[_memory(result)] = first
        if kind in CONVOLUTIONS | PRODUCTS | NORMS | FLASH:
            self.calls += 1
        if kind in NORMS:
            self.norms += 2 * first.numel() * self.source(first).element_size()
            self.normed.add(_memory(result))
        elif kind in FLASH:
            batch, heads, queries, width = first.shape
            self.flash += 4 * batch * heads * queries * read[1].shape[2] * width
        elif kind in BATCHED:
            self.calls += 0.5
        elif kind in SOFTMAX:
            self.dropped.add(_memory(result))
        elif kind is aten.silu and _memory(first) in self.normed:
            self.dropped.add(_memory(first))
        elif kind not in CONVOLUTIONS | PRODUCTS | FREE:
            self.pointwise += sum(x.numel() for x in (*read, *made))

    def source(self, x: Tensor) -> Tensor:
        """Tensor that a widened copy was made from; x itself if it is no such copy."""
        return self.narrow.get(_memory(x), x)


def count_work(config: ModelConfig, shape: tuple[int, ...], num_classes: int = 0, half: bool = True) -> NetworkWork:
    """The work of a network's forward pass.

    Args:
        config: the network, in training mode.
        shape: (channels, height, width) of an image.
        num_classes: of the data.
        half: whether products are taken in 16 bits, as by bf16's autocast.

    Raises:
        ConfigError: if the network does not take the shape, or recomputes its blocks.

    """
    if config.recompute:
        raise ConfigError(
            "model.recompute=true: no step with recomputed blocks was measured, so it cannot be planned; leave it out"
        )
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[_memory(x)] = x
        return x

    with FakeTensorMode():
        model = build_model(config, shape, num_classes)
        z, r, t = torch.zeros(BATCH, *shape), torch.zeros(BATCH), torch.ones(BATCH)
        label = {"label": torch.zeros(BATCH, dtype=torch.int64)} if config.class_conditional else {}
        counted = _Counted()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        with FlopCounterMode(display=False) as flops, counted, autocast, hooks:
            model(z, r, t, **label)
        weights = {_memory(p) for p in model.parameters()}
        parameters = sum(p.numel() for p in model.parameters())
    kept = _kept(saved, counted, weights, {tuple(p.shape) for p in model.parameters()})
    by_kind = flops.get_flop_counts()["Global"]
    return NetworkWork(
        parameters=parameters,
        convolution=_sum(by_kind, CONVOLUTIONS) / BATCH,
        product=_sum(by_kind, PRODUCTS) / BATCH,
        attention=(_sum(by_kind, BATCHED) + counted.flash) / BATCH,
        moved=(counted.norms + kept) / BATCH,
        kept=kept / BATCH,
        pointwise=counted.pointwise / BATCH,
        calls=round(counted.calls),
    )


def _kept(saved: dict[int, Tensor], counted: _Counted, weights: set[int], shapes: set[tuple[int, ...]]) -> int:
    """Bytes of activations: each memory once, as wide as a kernel needs it, without weights and their casts."""
    sources = {_memory(s): s for s in map(counted.source, saved.values()) if _memory(s) not in counted.dropped}
    return sum(
        s.untyped_storage().nbytes()
        for memory, s in sources.items()
        if memory not in weights and tuple(s.shape) not in shapes and tuple(reversed(s.shape)) not in shapes
    )


def _sum(by_kind: dict[Any, int], kinds: Iterable[Any]) -> float:
    return float(sum(by_kind.get(kind, 0) for kind in kinds))
