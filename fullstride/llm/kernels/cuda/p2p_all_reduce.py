"""The sum over GPUs that share a model, of what a decode step leaves: see `device_sum.cu`.

NCCL's takes twice as long for the few KB of a step's rows, twice a layer
(`benchmarks/results/llm-device-sums--nvidia-h200.json`).
"""

import functools
import hashlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
from jaxtyping import Array, Float

from fullstride.llm.kernels.cuda import driver, xla_ffi
from fullstride.llm.kernels.cuda.launch import Kernel
from fullstride.llm.kernels.cuda.target import HOPPER, capability_of, target_of

TARGET = "fullstride_device_sum"
# Bytes of the largest one: NCCL's kernels move more of them at once.
LARGEST = 256 << 10
BLOCKS, THREADS, MOST_RANKS = 64, 256, 8
FP32 = {"float32": 1, "bfloat16": 0}
LINE = 16  # bytes in which eight travel


device_sum_p = core.Primitive("cuda_device_sum")
device_sum_p.def_abstract_eval(lambda x, **_: x)

_users: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
_made: dict[str, tuple[tuple[int, ...], int, Kernel]] = {}
_making = threading.Lock()


def over(devices: Sequence[Any], axis: str) -> Callable[[Float[Array, "T hidden"]], Float[Array, "T hidden"]]:
    """A sum over some of JAX's devices, for programs that all of them run within `shard_map`.

    Args:
        devices: GPUs of this process.
        axis: of their mesh; larger sums, and those of GPUs that cannot reach each other or for which the kernel was not
            made, are XLA's own over it.

    """
    ordinals = tuple(device.local_hardware_id for device in devices)
    fits = len(ordinals) <= MOST_RANKS and target_of(capability_of(devices[0])) is HOPPER
    near = fits and driver.reach_each_other(ordinals)
    # Two engines of one process on the same GPUs must not take each other's lines for their own.
    own = next(_users[ordinals])

    def total(x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        if not near or x.nbytes > LARGEST or x.nbytes % 8 or str(x.dtype) not in FP32:
            return lax.psum(x, axis)
        return device_sum_p.bind(x, ordinals=ordinals, user=own)

    return total


def kernel(dtype: str, count: int, ranks: int) -> Kernel:
    """Return the kernel that sums `count` bytes over `ranks` GPUs.

    Its parameters: x, out, numbers, each GPU's memory (eight, in their order), rank.
    """
    constants = {"BYTES": count, "RANKS": ranks, "FP32": FP32[dtype], "BLOCKS": BLOCKS, "THREADS": THREADS}
    constants["MOST_LINES"] = LARGEST // 8
    return Kernel("device_sum", ("device_sum.cu",), tuple(constants.items()), THREADS, 0)


def memory_bytes(ranks: int) -> int:
    """Return the bytes of a GPU's receive buffer: two turns of lines from every rank."""
    return 2 * ranks * LARGEST // 8 * LINE


@functools.cache
def _memory(ordinals: tuple[int, ...], user: int) -> tuple[list[int], list[int]]:
    """Lines and numbers by which GPUs tell each other, on each; they stay, as programs have recorded the addresses."""
    lines = [driver.zeros(ordinal, memory_bytes(len(ordinals))) for ordinal in ordinals]
    return lines, [driver.zeros(ordinal, 4 * BLOCKS) for ordinal in ordinals]


def _execute(call: xla_ffi.FfiCall) -> None:
    if call.name not in _made:
        raise KeyError(f"sum {call.name} was not created in this process: trace and compile the program here")
    ordinals, user, made = _made[call.name]
    with _making:
        (lines, numbers), rank = _memory(ordinals, user), ordinals.index(driver.device())
        function = driver.function(made.ptx, made.name)
        launch = driver.PreparedLaunch(function, (BLOCKS, 1, 1), THREADS, 0, 4 + MOST_RANKS, early=False)
        unused = [0] * (MOST_RANKS - len(ordinals))
        launch(call.stream(), [*call.pointers, numbers[rank], *lines, *unused, rank])


def _lower(ctx: mlir.LoweringRuleContext, x: Any, ordinals: tuple[int, ...], user: int) -> Any:
    xla_ffi.register(TARGET, "CUDA", _execute)
    aval: Any = ctx.avals_in[0]
    made = kernel(str(aval.dtype), aval.size * aval.dtype.itemsize, len(ordinals))
    name = hashlib.sha256(f"{made.ptx} {ordinals} {user}".encode()).hexdigest()
    _made[name] = (ordinals, user, made)
    with _making:
        # Not when XLA records: memory that is asked for then, and waited for, could end the record.
        _memory(ordinals, user)
    rule: Any = jax.ffi.ffi_lowering(TARGET)
    return rule(ctx, x, name=name)


mlir.register_lowering(device_sum_p, _lower, platform="cuda")
