"""Chains of kernels as one JAX operation; each kernel begins while the previous one ends.

Programmatic dependent launch: a kernel's blocks come onto the GPU as soon as there is room, load what no kernel of the
chain writes, and wait (`await_previous`) before they touch the rest. XLA's own graph of kernels starts each when the
one before it has gone, which costs 3.6 us where nothing else has to be done.
"""

import functools
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from fullstride.llm.kernels.cuda import driver, xla_ffi
from fullstride.llm.kernels.cuda.launch import Kernel

TARGET = "fullstride_chain"


@dataclass(frozen=True)
class ChainLaunch:
    """Launch of a kernel in a chain.

    Attributes:
        kernel: whose parameters are pointers.
        grid: numbers of thread blocks.
        pointers: each parameter's place among operands and then results, and bytes from its start.

    """

    kernel: Kernel
    grid: tuple[int, int, int]
    pointers: tuple[tuple[int, int], ...]


def chain(
    links: Sequence[ChainLaunch],
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Launch kernels one after the other, as one operation.

    Args:
        links: in their order; each waits for the one before it, before it touches what another one writes.
        operands: arrays, row-major.
        results: shapes and dtypes of what comes out, and of what links tell each other by.
        aliases: operands that results replace in place.

    """
    shapes = tuple(ShapedArray(result.shape, result.dtype) for result in results)
    return tuple(chain_p.bind(*operands, links=tuple(links), shapes=shapes, aliases=tuple((aliases or {}).items())))


chain_p = core.Primitive("cuda_chain")
chain_p.multiple_results = True
chain_p.def_abstract_eval(lambda *_, shapes, **__: shapes)

# Chains that compiled programs name, and how each is launched; a launch is one thread's at a time, as engines of one
# process share them.
_links: dict[str, tuple[ChainLaunch, ...]] = {}
_made: dict[str, list[tuple[driver.PreparedLaunch, tuple[tuple[int, int], ...]]]] = {}
_launching = threading.Lock()


def _execute(call: xla_ffi.FfiCall) -> None:
    if call.name not in _made:
        raise KeyError(f"chain {call.name} was not created in this process: trace and compile the program here")
    stream = call.stream()
    with _launching:
        for launch, pointers in _made[call.name]:
            launch(stream, [call.pointers[place] + offset for place, offset in pointers])


@functools.cache
def _name(links: tuple[ChainLaunch, ...]) -> str:
    """Return a hash of the launches as their name, so that a cached program finds the same chain."""
    kernels = list(dict.fromkeys(link.kernel for link in links))
    told = [kernel.ptx for kernel in kernels]
    told += [f"{kernels.index(link.kernel)} {link.kernel} {link.grid} {link.pointers}" for link in links]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def ready(links: tuple[ChainLaunch, ...]) -> str:
    """Prepare a chain for programs that name it, in this process; returns the name."""
    xla_ffi.register(TARGET, "CUDA", _execute)
    name = _name(links)
    if name not in _made:
        _links[name], _made[name] = links, []
        for i, (kernel, grid, pointers) in enumerate((link.kernel, link.grid, link.pointers) for link in links):
            function = driver.function(kernel.ptx, kernel.name)
            launch = driver.PreparedLaunch(function, grid, kernel.threads, kernel.shared, len(pointers), early=i > 0)
            _made[name].append((launch, pointers))
    return name


def used_by(program: str) -> list[tuple[ChainLaunch, ...]]:
    """Return the chains that a lowered program names."""
    return [links for name, links in _links.items() if name in program]


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, links: Any, shapes: Any, aliases: Any) -> Any:
    name = ready(links)
    rule: Any = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(aliases))
    return rule(ctx, *operands, name=name)


mlir.register_lowering(chain_p, _lower, platform="cuda")
