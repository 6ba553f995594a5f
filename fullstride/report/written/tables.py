"""All tables of the README and of the documentation, each number out of `benchmarks/results/`."""

from pathlib import Path

from fullstride.report.markdown import Tables
from fullstride.report.reading import read_folder
from fullstride.report.written import (
    derivatives,
    distributed,
    engine,
    equinox,
    experiments,
    kernels,
    language,
    meanflow,
    plans,
    training,
)  # fmt: skip
from fullstride.report.written.headlines import headlines

MODULES = (meanflow, language, equinox, derivatives, training, distributed, experiments, engine, kernels)


def tables(results: Path) -> Tables:
    """What makes each table, by its name; it raises ConfigError where a result or a row that it needs is not there."""
    folder = read_folder(results)
    made = {"headlines": headlines} | {name: make for module in MODULES for name, make in module.TABLES.items()}
    of_results = {name: lambda make=make: str(make(folder)) for name, make in made.items()}
    return of_results | {"plans": plans.plans, "predicted": lambda: plans.predicted(results)}
