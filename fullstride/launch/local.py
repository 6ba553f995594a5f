"""Processes of this machine: one, or several by torchrun."""

from collections.abc import Callable
from functools import partial

from fullstride.launch.attempts import attempt_all, exit_code
from fullstride.launch.plan import Plan, shown_line
from fullstride.launch.processes import alone, together
from fullstride.launch.request import Request
from fullstride.launch.words import Words


def plan_local(request: Request, words: Words) -> Plan:
    """One process, started anew after what another attempt can better."""
    return _plan(request, words, alone)


def plan_torchrun(request: Request, words: Words) -> Plan:
    """Several processes, which torchrun starts anew together after one has failed."""
    return _plan(request, words, partial(together, processes=request.all_processes, restarts=request.attempts_after))


def _plan(request: Request, words: Words, line: Callable[[Words], list[str]]) -> Plan:
    # Several processes are torchrun's to start anew; a single one's attempts are made here.
    retries = 0 if request.by_torchrun else request.attempts_after

    def submit() -> int:
        return exit_code(attempt_all(words, line, retries=retries, delay=request.delay, seconds=request.seconds))

    own = f"retries: {retries}, {request.delay:g} s apart, with resume=true"
    lines = [
        shown_line(line(words)),
        f"restarts: {request.attempts_after}, by torchrun" if request.by_torchrun else own,
    ]
    if request.hours:
        lines.append(f"time: {request.hours:g} h an attempt")
    return Plan("\n".join(lines), submit)
