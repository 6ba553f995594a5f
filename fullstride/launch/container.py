"""Launch inside a container, which may restart on another machine; persistent files show whether it began before."""

import argparse
import sys
from functools import partial
from pathlib import Path

from fullstride.launch.attempts import attempt_all, exit_code
from fullstride.launch.processes import torchrun_command

# Where everything lies in a container; WORK is where commands run, so that `runs` is RUNS.
WORK = "/fullstride"
RUNS, TRACKING, CACHE = f"{WORK}/runs", f"{WORK}/tracking", f"{WORK}/cache"
ENVIRONMENT = {"TRACKIO_DIR": TRACKING, "FULLSTRIDE_CACHE": CACHE, "PYTHONUNBUFFERED": "1"}
BEGUN = ".launches"


def begin(runs: Path, launch: str) -> bool:
    """Leave a note that a launch has begun; return whether there was one, so that a run must be resumed."""
    note = runs / BEGUN / launch
    note.parent.mkdir(parents=True, exist_ok=True)
    again = note.exists()
    note.touch()
    return again


def main(arguments: list[str]) -> int:
    """Run `python -m fullstride.launch.container OPTIONS -- COMMAND`, as SkyPilot's tasks do; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launch", required=True, help="name of this launch, the same on every machine")
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs, which outlives the machine")
    parser.add_argument("--retries", type=int, required=True)
    parser.add_argument("--delay", type=float, required=True, help="seconds")
    parser.add_argument("--seconds", type=float, required=True, help="time limit of an attempt; 0 means none")
    parser.add_argument("--processes", type=int, default=1, help="number of processes on this machine")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rank", default="0", help="rank of this machine")
    parser.add_argument("--meeting", default="", help="HOST:PORT at which several machines meet")
    parser.add_argument("words", nargs="+")
    given = parser.parse_args(arguments)
    spread = {"restarts": given.retries, "nodes": given.nodes, "meeting": given.meeting, "job": given.launch}
    ended = attempt_all(
        given.words,
        partial(torchrun_command, processes=given.processes, **spread),
        # Several processes are torchrun's to start anew.
        retries=0 if given.processes * given.nodes > 1 else given.retries,
        delay=given.delay,
        seconds=given.seconds,
        again=begin(given.runs, f"{given.launch}.{given.rank}"),
    )
    return exit_code(ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
