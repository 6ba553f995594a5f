"""Results that are not known to be of the present code, and the commands that measure them anew."""

from collections.abc import Iterator

from fullstride.report import experiments, overview
from fullstride.report.case import Case
from fullstride.report.history import Freshness, History
from fullstride.report.reading import Folder, Source

CURRENT = "current"
NOT_RECORDED = "# its command was not recorded"


def judged(folder: Folder, history: History) -> Iterator[tuple[Source, Freshness]]:
    """Every file of a folder that is read, with its status, as the page has them."""
    for result in folder.results:
        yield result, history.freshness(result, overview.case_of(result.case).paths)
    for source in folder.experiments:
        yield source, history.freshness(source, experiments.PATHS)
    for source in folder.others:
        yield source, history.freshness(source, Case(source.name, "").paths)


def to_renew(folder: Folder, history: History, machine: str = "") -> list[tuple[Source, Freshness]]:
    """Those that are stale or unknown, of machines whose name has `machine` in it, whatever its case."""
    found = [(s, status) for s, status in judged(folder, history) if machine.lower() in s.machine.lower()]
    return [(source, status) for source, status in found if status.status != CURRENT]


def script(renewed: list[tuple[Source, Freshness]]) -> str:
    """A shell script: a comment a file, and the command below it, each command once."""
    files: dict[str, list[str]] = {}
    for source, status in renewed:
        told = f"# {source.name} ({source.machine}, {source.date}): {status}"
        files.setdefault(source.command or NOT_RECORDED, []).append(told)
    last = {NOT_RECORDED: files.pop(NOT_RECORDED)} if NOT_RECORDED in files else {}
    return "\n".join(line for command, names in (files | last).items() for line in (*names, command))
