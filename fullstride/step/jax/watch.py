"""Errors of steps that nobody waits for: checked when a step is done, raised with their message."""

import itertools
import logging
import sys
from collections import deque
from math import isfinite
from typing import Any

import equinox as eqx
import jax
import numpy as np

# How equinox names the error that `error_if` raises inside of the device's callback, and what follows its message.
# A local variable `__equinox_jit_id__` of this value marks where the stack that Equinox shows ends.
JIT_ID = b"fullstride"
MARK, REST = "_EquinoxRuntimeError: ", "\n\n\n-----"


class RunningSteps:
    """Losses of the steps that may still be running, oldest first."""

    def __init__(self, check_finite: bool):
        self.check_finite = check_finite
        # Whether losses lie on another device than the host; known from the first one.
        self._far: bool | None = None
        self.running: deque[tuple[int, Any]] = deque()

    def add(self, number: int, loss: Any) -> None:
        """Watch a step that was just dispatched; its loss is copied to the host when it is ready."""
        if self._far is None:
            self._far = any(device.platform != "cpu" for device in loss.devices())
        if self._far:
            loss.copy_to_host_async()
        self.running.append((number, loss))

    def poll(self) -> None:
        """Check the steps that are done, without waiting for the others.

        Raises:
            EquinoxRuntimeError: what `equinox.error_if` found, with its message.
            FloatingPointError: for a loss that is not finite.

        """
        running = self.running
        while running and running[0][1].is_ready():
            self._check(*running.popleft())

    def trouble(self) -> Exception | None:
        """Return the error that `poll` would raise: a failed dispatch may be due to an earlier step."""
        try:
            self.poll()
        except (eqx.EquinoxRuntimeError, FloatingPointError, jax.errors.JaxRuntimeError, ValueError) as error:
            return error
        return None

    def drain(self) -> None:
        """Wait for all of them; raises as `poll`."""
        while self.running:
            self._check(*self.running.popleft())

    def busy(self) -> bool:
        """Return whether a step before the newest is still running."""
        return len(self.running) > 1 and not self.running[-2][1].is_ready()

    def _check(self, number: int, loss: Any) -> None:
        try:
            value = np.asarray(loss)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            self.running.clear()
            raise translated(error, f" (step {number})") from None
        # NumPy's own check of a scalar takes ten times as long.
        if self.check_finite and not (isfinite(value) if value.ndim == 0 else np.isfinite(value).all()):
            self.running.clear()
            # A call may hold several steps: how many there were after the first bad one.
            left = value.size - 1 - int(np.argmin(np.isfinite(value)))
            raise FloatingPointError(
                f"the loss of step {number - left} is {value.ravel()[-1 - left]}, so the steps after it are lost too; "
                "resume from a checkpoint before it, or skip such steps with skip_nonfinite=True"
            )


def translated(error: Exception, where: str = "") -> Exception:
    """Return the error of `equinox.error_if` with its own message, or the given one if it is another.

    The stack of the trace and Equinox's advice are in the message, as under `equinox.filter_jit`, or, of a step that is
    said `where`, in a note: that error may be raised by a later call, whose own stack is another.
    """
    text = str(error)
    if MARK not in text:
        return error
    message = text.partition(MARK)[2].partition(REST)[0]
    explained = _explained(message)
    if not where or explained == message:
        return eqx.EquinoxRuntimeError(explained + where)
    found = eqx.EquinoxRuntimeError(message + where)
    _, _, rest = explained.partition("\n")
    found.add_note(f"The stack inside of the step:\n{rest}")
    return found


def _explained(message: str) -> str:
    """The message as `equinox.filter_jit` has it, with the stack of the trace; itself if that is another error's."""
    module = sys.modules["equinox._jit"]
    told, stack = getattr(module, "last_error_info", None) or ("", [])
    form = getattr(module, "_on_error_msg", "")
    if told != message or not form:
        return message
    frames = itertools.takewhile(lambda piece: piece != JIT_ID, stack)
    return form.format(msg=message, stack="".join(reversed([x for x in frames if isinstance(x, str)])))


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        return kind is None or kind.__name__ != MARK.removesuffix(": ")


def silence_callbacks() -> None:
    """Keep JAX from logging the traceback of an `error_if` that is raised anyway; other callbacks stay loud."""
    logger = logging.getLogger("jax._src.callback")
    if not any(isinstance(f, _Silence) for f in logger.filters):
        logger.addFilter(_Silence())
