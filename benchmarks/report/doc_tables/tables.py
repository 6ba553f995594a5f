"""All tables of the README and of the documentation, each number out of `benchmarks/results/`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report.doc_tables import (
    derivatives,
    distributed,
    engine,
    equinox,
    experiments,
    kernels,
    language,
    machines,
    meanflow,
    plans,
    profile,
    training,
)
from benchmarks.report.doc_tables.headlines import headlines
from benchmarks.report.markdown import MarkdownTable, Tables, of_machine
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError

MODULES = (
    meanflow,
    language,
    equinox,
    derivatives,
    training,
    profile,
    distributed,
    experiments,
    engine,
    kernels,
    machines,
)


def tables(results: Path) -> Tables:
    """What makes each table, by its name; it raises ConfigError where a result or a row that it needs is not there."""
    folder = read_folder(results)
    made = {"headlines": headlines} | {name: make for module in MODULES for name, make in module.TABLES.items()}
    of_results = {
        name: lambda machine="", name=name, make=make: _text(name, make, folder, machine) for name, make in made.items()
    }
    of_plans = {"plans": plans.plans, "plan-factors": plans.factors, "predicted": lambda: plans.predicted(results)}
    return of_results | {name: partial(_planned, name, make) for name, make in of_plans.items()}


def _planned(name: str, make: Callable[[], str], machine: str = "") -> str:
    if machine:
        raise ConfigError(
            f"table {name!r} of {machine}: it is of one machine, that which the planner was fitted on; leave out 'of "
            f"{machine}'"
        )
    return make()


def _text(name: str, make: Callable[[Folder], MarkdownTable], folder: Folder, machine: str) -> str:
    try:
        return str(make(of_machine(folder, machine) if machine else folder))
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f"table {name!r}: a result is not as it expects ({type(error).__name__}: {error}); measure it again, or "
            "take the table out"
        ) from error
