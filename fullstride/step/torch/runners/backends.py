"""Backends of a step: eager, compiled, captured in a CUDA graph, or both; or whichever is measured to be fastest.

`auto` measures the backends by the first steps of the training itself, and the fastest one goes on.
"""

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fullstride.assets.fetch import cache_folder
from fullstride.device.tensor_trees import in_memory, mapped
from fullstride.device.triton_compile import start_processes
from fullstride.errors import MOST_SHOWN, ConfigError, one_line, one_of, shortened
from fullstride.runs.atomic_files import note
from fullstride.step.torch.body import Body, Loss, Runner
from fullstride.step.torch.errors import StepError
from fullstride.step.torch.metrics import Metrics
from fullstride.step.torch.optimizers import check_skips, members
from fullstride.step.torch.passes import ONE, passes_of
from fullstride.step.torch.runners.graph import GraphRunner
from fullstride.step.torch.runners.step_times import COUNTED, UNCOUNTED

BACKENDS = ("eager", "graph", "compile", "compile+graph")
_NUMBERS = itertools.count()


def check_backend(name: str, device: torch.device, optimizer: torch.optim.Optimizer, scaled: bool = False) -> None:
    """Check that the backend can run here; with a `scaled` loss, whose steps may be skipped.

    Raises:
        ConfigError: if it cannot, with the reason and the remedy.

    """
    one_of("backend", name, BACKENDS)
    if name != "eager" and (passes := passes_of(optimizer)) != ONE:
        raise ConfigError(
            f"backend={name}: {type(optimizer).__name__} steps by {passes}, which the host evaluates; use backend=eager"
        )
    if "graph" not in name:
        return
    if device.type != "cuda":
        raise ConfigError(f"backend={name}: CUDA graphs are CUDA's, the device is {device.type}; use eager or compile")
    for each in members(optimizer):
        if all("capturable" in group for group in each.param_groups):
            continue
        raise ConfigError(
            f"backend={name}: {type(each).__name__} cannot be captured, as its state is on the host; use one with "
            "capturable=True, as AdamW, or backend=eager or compile"
        )
    if scaled:
        check_skips(optimizer, f"backend={name} with a scaler")


def start_compiler(backend: str, device: torch.device) -> None:
    """Start the compiler's processes, which takes them some seconds, if steps by this backend are compiled."""
    if backend == "auto" or "compile" in backend:
        start_processes(device)


def compiled(body: Body) -> Body:
    """Return the body with its loss compiled, the derivative and the gradient included."""
    on_cpu = all(p.device.type == "cpu" for p in body.trained.values())
    # Of several graphs each numbers its own gradients: they are sent when they arrive.
    telling = body.reducer is not None and body.fullgraph
    loss = compiled_loss(body.loss, telling=telling, on_cpu=on_cpu, fullgraph=body.fullgraph)
    return replace(body, loss=loss)


def compiled_loss(loss: Loss, *, telling: bool = False, on_cpu: bool = False, fullgraph: bool = True) -> Loss:
    """Compile a loss.

    Random numbers inside it, as dropout's, are eager's. What is compiled is kept in fullstride's cache, and not among
    temporary files: the same run starts faster the next time.

    Args:
        loss: of a module and a batch.
        telling: announce each gradient of the backward pass as soon as it exists; see `early_gradients`.
        on_cpu: whether the module is. Then images keep the memory order that they have in eager code: random numbers
            are drawn in it, and the order that the compiler likes would have dropout leave out other elements.
        fullgraph: whether it has to be one graph; otherwise what cannot be traced runs eagerly between several.

    """
    import torch._inductor.config as inductor  # the compiler is a long import

    from fullstride.step.torch.runners.dense_gradients import DenseGradients

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    options: dict[str, Any] = {"fallback_random": True}
    if inductor.post_grad_custom_pre_pass is None:  # not of the user's own
        options["post_grad_custom_pre_pass"] = DenseGradients()
    if on_cpu:
        options["layout_optimization"] = False
    if telling:
        from fullstride.step.torch.distributed.inductor_pass import MarkReady

        options["post_grad_custom_post_pass"] = MarkReady()
    own = with_own_code(loss)
    compiled = torch.compile(own, fullgraph=fullgraph, dynamic=False, options=options)
    call = _or_eager(compiled, loss)
    call.__name__ = own.__name__
    return call


def _or_eager(compiled: Loss, loss: Loss) -> Loss:
    """Return the compiled loss, replaced by the eager one once the compiler refuses another recompilation."""
    refused = False

    @functools.wraps(compiled)
    def call(model: nn.Module, batch: Any) -> Any:
        nonlocal refused
        if refused:
            return loss(model, batch)
        try:
            return compiled(model, mapped(in_memory, batch))
        except Exception as error:
            kind = type(error).__name__  # whose module is a long import
            raised = type(error.__cause__).__name__.startswith("Observed")  # by the loss itself
            if kind == "Unsupported" and not raised:
                raise StepError(
                    f"backend=compile: the loss is not one graph ({shortened(one_line(error), MOST_SHOWN)}); expected "
                    "what torch.compile(fullgraph=True) traces: use fullgraph=False, or backend=eager or graph"
                ) from error
            if kind != "FailOnRecompileLimitHit":
                raise
        refused = True
        note(
            f"the loss was compiled {torch._dynamo.config.recompile_limit} times, as something in it that is no tensor "
            "changes again and again, as the compiler's own line says; it runs uncompiled from here on"
        )
        return loss(model, batch)

    return call


def with_own_code(function: Callable) -> Callable:
    """Return a function that calls this one, with a code object of its own, whose name no other has.

    The compiler keeps what it has compiled with the code, counts it there, and beyond eight (its `recompile_limit`)
    refuses: of trainings one after another in a process, whose losses share their code, the last would not begin.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    name = f"loss_{next(_NUMBERS)}"
    return FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)


def make_runner(name: str, body: Body, compiled_body: Callable[[], Body]) -> Runner:
    """Make the runner of a backend that was checked."""
    if name != "eager" or body.reducer is not None:
        body = replace(body, dense=True)
    whole = replace(compiled_body(), dense=True) if "compile" in name else body
    return (GraphRunner if "graph" in name else Runner)(name, whole, body)


class AutoRunner:
    """Runner that times each candidate for some steps and chooses the fastest; no step of the training is lost.

    Attributes:
        runner: that of the candidate whose turn it is, made anew at each turn, and at last the chosen one's.
        chosen: whether all were measured.
        milliseconds: medians of those measured.
        refused: why others were not.

    """

    def __init__(
        self, candidates: dict[str, Callable[[], Runner]], device: torch.device, agree: Callable[[float], float]
    ):
        """Take what makes each candidate's runner, and what makes of a time that of all processes."""
        self._candidates = candidates
        self._device = device
        self._agree = agree
        self._waiting = list(candidates)
        self.milliseconds: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.chosen = False
        self._begin(self._waiting.pop(0))

    def __str__(self) -> str:
        return f"backend=auto: {self.runner.backend} ({self.said})"

    @property
    def said(self) -> str:
        """Times of those measured, the fastest first, and why others were refused."""
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(self.milliseconds.items(), key=lambda x: x[1]))
        return "; ".join([times, *(f"{name}: {why}" for name, why in self.refused.items())])

    def _begin(self, name: str) -> None:
        self.runner = self._candidates[name]()
        self.forget()

    def forget(self) -> None:
        """Count the current candidate's steps from the beginning."""
        self._made, self._times = 0, list[float]()

    def timed(self, step: Callable[[], Metrics]) -> Metrics:
        """Time a step of the current candidate, which may be its last."""
        start = self._now()
        metrics = step()
        self._made += 1
        if self._made > UNCOUNTED:
            self._times.append(self._now() - start)
        if len(self._times) == COUNTED:
            self.milliseconds[self.runner.backend] = self._agree(1e3 * statistics.median(self._times))
            self._end_turn()
        return metrics

    def refuse(self, reason: str) -> None:
        """Go on without the current candidate.

        Raises:
            RuntimeError: if no other is left.

        """
        self.refused[self.runner.backend] = " ".join(reason.split())[:200]
        self._end_turn()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _end_turn(self) -> None:
        if self._waiting:
            self._begin(self._waiting.pop(0))
            return
        if not self.milliseconds:
            raise RuntimeError(f"no backend can make this step: {self.refused}")
        best = min(self.milliseconds, key=lambda name: self.milliseconds[name])
        if best != self.runner.backend:
            self._begin(best)
        self.chosen = True
