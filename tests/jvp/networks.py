"""Small networks as a user writes them, points to differentiate them at, and the memory of their backward pass."""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride import jvp as ops


class ConvNet(nn.Module):
    """Torch's own layers only: convolutions, norms, pooling, up-sampling, in-place activations."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.down = nn.Conv2d(12, 20, 3, stride=2, padding=1)
        self.batch = nn.BatchNorm2d(20).eval()
        self.up = nn.ConvTranspose2d(20, 12, 2, stride=2)
        self.out = nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm(self.first(x)))
        low = F.relu(self.batch(self.down(h)), inplace=True)
        low = low + F.interpolate(F.avg_pool2d(low, 2), scale_factor=2)
        return self.out(torch.cat([self.up(low), F.gelu(h)], 1)).tanh()


class Gated(nn.Module):
    """Chunks, splits, slices written in place, softmax, products of views."""

    def __init__(self):
        super().__init__()
        self.wide, self.out = nn.Linear(10, 24), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.wide(x).chunk(2, -1)
        h = a * torch.sigmoid(b)
        h = h.clone()
        h[..., :4] = a[..., 4:8].sin()
        h += torch.softmax(b, -1)
        h.view(-1)[::3].mul_(1.5)
        left, right = h.split([5, 7], -1)
        return self.out(torch.cat([right, left], -1).transpose(0, 1)).transpose(0, 1)


class Transformer(nn.Module):
    """One block through the given ops: qk-norm, attention, adaptive LayerNorm, a perceptron."""

    def __init__(self, given: ModuleType, width: int = 12, heads: int = 3):
        super().__init__()
        self.ops, self.heads = given, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width // heads))
        self.modulation = nn.Linear(width, 2 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.ops.layer_norm(x, self.norm.weight, self.norm.bias)
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.ops.rms_norm(q, self.scale), self.ops.rms_norm(k, self.scale)
        x = x + self.out(self.ops.attention(q, k, v).transpose(1, 2).flatten(2))
        shift, scale = self.modulation(t).chunk(2, -1)
        return x + self.mlp(self.ops.ada_layer_norm(x, scale, shift))


class Block(nn.Module):
    """A U-Net's residual block through the given ops."""

    def __init__(self, given: ModuleType, channels: int = 8):
        super().__init__()
        self.ops, self.norm = given, nn.GroupNorm(2, channels)
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ops.group_norm(self.first(x), 2, self.norm.weight, self.norm.bias, act="silu")
        return x + self.second(h)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "conv_net": [(2, 3, 8, 8)],
    "gated": [(5, 3, 10)],
    "transformer": [(2, 7, 12), (2, 12)],
    "block": [(2, 8, 5, 6)],
}
OURS: dict[str, Callable[[Any], nn.Module]] = {"transformer": Transformer, "block": Block}
TORCHS: dict[str, Callable[[], nn.Module]] = {"conv_net": ConvNet, "gated": Gated}


def random_network(name: str, given: Any = ops, seed: int = 0) -> nn.Module:
    """Return the network in fp64 with random parameters, so that none hides a path."""
    net = OURS[name](given) if name in OURS else TORCHS[name]()
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5
    return net.double()


def random_points(name: str, seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Primals and tangents."""
    generator = torch.Generator().manual_seed(seed + 1000)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return tuple(map(draw, SHAPES[name])), tuple(map(draw, SHAPES[name]))


class _Saved:
    """A detached saved tensor: an output that its own node saves would keep that node alive."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


def saved_bytes(call: Callable[[], Any]) -> int:
    """Return the bytes of all tensors that are saved for a backward pass while the call's result lives."""
    live: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        holder = _Saved(tensor)
        live.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = call()
    storages = {holder.tensor.untyped_storage()._cdata: holder.tensor for holder in live}
    assert result is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class _Allocated(TorchDispatchMode):
    """Mode that counts the bytes of live storages that operations allocate."""

    def __init__(self):
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._known:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the peak bytes of tensors that a call allocates."""
    call()
    with _Allocated() as seen:
        call()
    return seen.most
