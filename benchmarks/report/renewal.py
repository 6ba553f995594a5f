"""Results that are not known to be of the present code, and the commands that measure them anew."""

import re
from collections.abc import Iterator

from benchmarks.report import overview
from benchmarks.report.history import Freshness, History
from benchmarks.report.reading import Folder, Source
from fullstride.measure.environment import FOLDER

CURRENT = "current"
NOT_RECORDED = "# its command was not recorded"
# What cannot be run as it is written.
FILL_IN = f"# put folders for {FOLDER}: "
NODES = "# start it on every node, with a rendezvous: "
# Which makes no run, and what an experiment is told in its place that makes none unasked.
GATHERING = " --collect"
RACE = f" --gpus N,N --official {FOLDER}py-meanflow"
MAKING = {"time-to-quality": RACE, "time-to-quality-annealed": RACE}
# Commands by the names that they had in older results.
OLD = re.compile(r"(?P<launcher>torchrun .*-m )?fullstride (?:bench|experiment) ")
KEPT = "# what is finished in its folder of runs is not run again, so remove that, or give other --runs: "


Judged = tuple[Source, Freshness]


def judged(folder: Folder, history: History) -> Iterator[Judged]:
    """Every file of a folder that is read, with its status, as the page has them."""
    judge = overview.judge_by(history)
    for source in (*folder.results, *folder.experiments, *folder.others):
        yield source, judge(source)


def script(renewed: list[Judged]) -> str:
    """A shell script: a comment a file, and below it the command, once, commented out where somebody must see to it."""
    files: dict[str, list[str]] = {}
    for source, status in renewed:
        told = f"# {source.name} ({source.machine}, {source.date}): {status}"
        files.setdefault(_line(source), []).append(told)
    last = {NOT_RECORDED: files.pop(NOT_RECORDED)} if NOT_RECORDED in files else {}
    return "\n".join(line for command, names in (files | last).items() for line in (*names, command))


def _line(source: Source) -> str:
    if not source.command:
        return NOT_RECORDED
    command = OLD.sub(_renamed, source.command)
    if "torchrun --nnodes=" in command:
        return NODES + command
    if "experiment" in source.data:
        return KEPT + command.replace(GATHERING, MAKING.get(source.data["experiment"], ""))
    return (FILL_IN if FOLDER in command else "") + command


def _renamed(found: re.Match[str]) -> str:
    return f"{found['launcher'] or 'python -m '}benchmarks "
