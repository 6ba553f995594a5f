"""Local launches: one process, or several by torchrun."""

import shlex

from fullstride.launch.attempts import attempt_all, exit_code
from fullstride.launch.processes import torchrun_command
from fullstride.launch.request import LaunchPlan, LocalRequest
from fullstride.launch.words import Words


def plan(request: LocalRequest, words: Words) -> LaunchPlan:
    """Plan one process, which is restarted if that can help, or several, which torchrun restarts."""

    def line(words: Words) -> list[str]:
        return torchrun_command(words, request.all_processes, restarts=request.retries)

    def submit() -> int:
        ended = attempt_all(words, line, retries=request.own_retries, delay=request.delay, seconds=request.seconds)
        return exit_code(ended)

    if request.by_torchrun:
        again = f"restarts: {request.retries}, by torchrun"
    else:
        again = f"retries: {request.retries}, {request.delay:g} s apart, with resume=true"
    limit = [f"time: {request.time:g} h an attempt"] if request.time else []
    return LaunchPlan("\n".join([shlex.join(line(words)), again, *limit]), submit)
