"""Processes of this machine: one, or several by torchrun."""

from collections.abc import Callable
from functools import partial

from fullstride import exits
from fullstride.launch.attempts import attempt_all, exit_code
from fullstride.launch.plan import Plan, shown_line
from fullstride.launch.processes import alone, together
from fullstride.launch.request import Request
from fullstride.launch.words import Words


def plan_local(request: Request, words: Words) -> Plan:
    """One process, started anew after what another attempt can better."""
    return _plan(request, words, alone, request.attempts_after)


def plan_torchrun(request: Request, words: Words) -> Plan:
    """Several processes, which torchrun starts anew together after one has failed."""
    processes = request.processes or 1
    line = partial(together, processes=processes, restarts=request.attempts_after)
    # A single process is not torchrun's, and the attempts are made here.
    return _plan(request, words, line, 0 if processes > 1 else request.attempts_after)


def _plan(request: Request, words: Words, line: Callable[[Words], list[str]], retries: int) -> Plan:
    def submit() -> int:
        ended = attempt_all(words, line, retries=retries, delay=request.retry_delay, seconds=request.seconds)
        return exits.DONE if ended.told and ended.code == exits.DONE else exit_code(ended)

    lines = [shown_line(line(words)), f"retries: {retries}, {request.retry_delay:g} s apart, with resume=true"]
    if request.hours:
        lines.append(f"time: {request.hours:g} h an attempt")
    return Plan("\n".join(lines), submit)
