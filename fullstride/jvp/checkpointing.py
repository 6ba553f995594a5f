"""Activation checkpointing that works with a JVP: the backward pass recomputes a module's activations.

`torch.utils.checkpoint` counts what each pass saves, and a forward pass with tangents saves other tensors than one
without: it fails if a derivative is taken in eager mode. Only the primal has a gradient here, so only it is computed
anew; the tangent is computed once and kept nowhere.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as torchs

from fullstride.jvp.dual import pack, unpack
from fullstride.jvp.mixed_batch import Batch, MixedBatch
from fullstride.jvp.state import tangent_grad


def checkpoint(module: nn.Module, *args: Batch) -> Batch:
    """Compute module(*args), saving only its arguments for the backward pass (arXiv:1604.06174).

    Under `fullstride.jvp.jvp` the derivative goes through it. What is random, such as dropout, is drawn alike again;
    during a graph capture, the module must draw nothing. Compiled, it is `torch.utils.checkpoint` and the
    compiler decides what is saved.

    Args:
        module: function or module that returns a tensor; its parameters get their gradients.
        args: tensor arguments.

    Raises:
        RuntimeError: inside a transform of torch.func, also that of `jvp(tangent_grad=True)` in eager mode.

    """
    if torch.compiler.is_compiling():
        return _compiled(module, args)
    if not torch.is_grad_enabled():
        return module(*args)
    if peek_interpreter_stack() is not None or (tangent_grad() and forward_ad._current_level >= 0):
        raise RuntimeError(
            "checkpoint inside a transform of torch.func, expected fullstride.jvp.jvp without tangent_grad, or none; "
            "compile the step, or leave checkpoint out"
        )
    primals = tuple(_unpacked(x)[0] for x in args)
    settings = _Settings(module, primals)
    with torch.no_grad():
        given = module(*(MixedBatch(x.primal, x.tangent) if isinstance(x, MixedBatch) else x for x in args))
    out, tangent = _unpacked(given)
    primal = _Recomputed.apply(module, settings, len(args), out, *primals, *module.parameters())
    return MixedBatch(primal, given.tangent) if isinstance(given, MixedBatch) else pack(primal, tangent)


def _unpacked(x: Batch) -> tuple[Tensor, Tensor | None]:
    return (x.primal, x.tangent) if isinstance(x, MixedBatch) else unpack(x)


def _compiled(module: nn.Module, args: tuple[Batch, ...]) -> Batch:
    """Call torch's checkpoint with tensors only, which is all that it supports."""
    if not any(isinstance(x, MixedBatch) for x in args):
        return torchs(module, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]
    some = [isinstance(x, MixedBatch) for x in args]
    primals = [x.primal if isinstance(x, MixedBatch) else x for x in args]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        tangents = iter(tensors[len(args) :])
        given = zip(tensors[: len(args)], some, strict=True)
        out = module(*(MixedBatch(x, next(tangents)) if moves else x for x, moves in given))
        return out.primal, out.tangent

    tangents = [x.tangent for x in args if isinstance(x, MixedBatch)]
    return MixedBatch(*torchs(run, *primals, *tangents, use_reentrant=False))  # pyright: ignore[reportGeneralTypeIssues]


class _Settings:
    """Saved autocast and random state, to be restored later."""

    def __init__(self, module: nn.Module, tensors: tuple[Tensor, ...]):
        kind = tensors[0].device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self._device = tensors[0].device if kind == "cuda" else None
        # A module may also draw random numbers in its own code, which cannot be seen.
        kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
        drops = module.training and any(isinstance(m, kinds) and m.p > 0 for m in module.modules())
        # A state cannot be read during a graph capture: read it only if it is known to matter.
        self._random = drops or self._device is None or not torch.cuda.is_current_stream_capturing()
        if self._random:
            self._host = torch.get_rng_state()
            self._cuda = torch.cuda.get_rng_state(self._device) if self._device is not None else None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the saved autocast and random state while the context is open."""
        with torch.autocast(**self._autocast), contextlib.ExitStack() as stack:
            if self._random:
                stack.enter_context(torch.random.fork_rng([self._device] if self._device is not None else []))
                torch.set_rng_state(self._host)
                if self._cuda is not None and self._device is not None:
                    torch.cuda.set_rng_state(self._cuda, self._device)
            yield


class _Recomputed(torch.autograd.Function):
    """The primal's output, whose graph is built in the backward pass."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, settings: _Settings, count: int, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.module, ctx.settings, ctx.count = module, settings, count
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        args, parameters = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[4:]
        fresh = [x.detach().requires_grad_(n) for x, n in zip(args, needed, strict=False)]
        with torch.enable_grad(), ctx.settings.again():
            out = ctx.module(*fresh)
        wanted = [x for x, n in zip((*fresh, *parameters), needed, strict=True) if n]
        found = iter(torch.autograd.grad(out, wanted, gradients, allow_unused=True))
        return None, None, None, None, *(next(found) if n else None for n in needed)
