"""Results that are not known to be of the present code, and the commands that measure them anew."""

from collections.abc import Iterator

from fullstride.measure.environment import FOLDER
from fullstride.report import overview
from fullstride.report.history import Freshness, History
from fullstride.report.reading import Folder, Source

CURRENT = "current"
NOT_RECORDED = "# its command was not recorded"
# What cannot be run as it is written.
FILL_IN = f"# put folders for {FOLDER}: "
NODES = "# start it on every node, with a rendezvous: "
# Which makes no run, and what an experiment is told in its place that makes none unasked.
GATHERING = " --collect"
RACE = f" --gpus N,N --official {FOLDER}py-meanflow"
MAKING = {"time-to-quality": RACE, "time-to-quality-annealed": RACE}
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
    if "torchrun --nnodes=" in source.command:
        return NODES + source.command
    if "experiment" in source.data:
        return KEPT + source.command.replace(GATHERING, MAKING.get(source.data["experiment"], ""))
    return (FILL_IN if FOLDER in source.command else "") + source.command
