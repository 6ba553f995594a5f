"""`fullstride experiment ...`: evidence by several seeds; each command imports what it runs when it runs."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullstride.cli_gpus import Gpus, Lines, SharedGpus, options, spread
from fullstride.errors import ConfigError
from fullstride.stop import leaving_on_sigterm

if TYPE_CHECKING:
    from fullstride.meanflow.experiments.race import Asked

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run an experiment over several seeds: mean, spread, JSON."
)

RESULTS = Path("benchmarks/results")
Scale = Annotated[str, typer.Option(metavar="smoke|cpu|gpu", help="Seconds, minutes on a CPU, or real sizes on a GPU.")]
Parts = Annotated[
    list[str] | None, typer.Option("--part", metavar="NAME", help="One question, one each; all if absent.")
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", min=0, metavar="N", help="One seed, one each; 0, 1 and 2 if absent.")
]
Collect = Annotated[bool, typer.Option("--collect", help="Run nothing; write the result of what is finished.")]
Runs = Annotated[Path, typer.Option(help="Folder of the runs; what is finished there is not run again.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the JSON; benchmarks/results, of smoke the folder of the runs.")
]


def results_folder(out: Path | None, scale: str, runs: Path) -> Path:
    """Where a result goes: a smoke test's is no evidence, and stays out of the folder of results."""
    return out or (runs / "results" if scale == "smoke" else RESULTS)


def _phase(
    name: str,
    scale: str,
    part: list[str] | None,
    seed: list[int] | None,
    gpus: str | None,
    collect: bool,
    runs: Path,
    out: Path | None,
) -> None:
    with leaving_on_sigterm():
        from fullstride.meanflow.experiments.phase import Asked, run
        from fullstride.meanflow.experiments.spec import SEEDS

        seeds = tuple(dict.fromkeys(seed or SEEDS))
        asked = Asked(scale, tuple(part or ()), seeds, collect or gpus is not None, runs)
        asked.check(name)
        if gpus is not None:
            # What each process finds alone is no result of the experiment, and stays beside its log.
            rest = options(scale=scale, part=part, runs=runs, out=runs / "logs" / "results")
            lines = {f"{name}-{one}": [name, *options(seed=one), *rest] for one in seeds}
            spread(gpus, lines, runs, collect, shared=True)
        run(name, asked, results_folder(out, scale, runs))


def _add_phase(name: str, about: str) -> None:
    @app.command(name, help=about)
    def phase(
        scale: Scale = "cpu",
        part: Parts = None,
        seed: Seeds = None,
        gpus: SharedGpus = None,
        collect: Collect = False,
        runs: Runs = Path("runs/experiments"),
        out: Out = None,
    ) -> None:
        _phase(name, scale, part, seed, gpus, collect, runs, out)


_add_phase("phase2", "Learn ten pictures by heart: flow matching, its weights alone, MeanFlow.")
_add_phase(
    "phase3", "Sanity checks: MeanFlow's steps beside ODE solvers, several pictures a label, no adaptive weight."
)
_add_phase("phase4", "Ablations on real pictures: share of r != t, laws of the times, power of the weight.")


@app.command("time-to-quality")
def time_to_quality(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value of the recipe, for both codes, e.g. data.path=FOLDER.")
    ] = None,
    code: Annotated[str, typer.Option(metavar="fullstride|official", help="Whose training this process makes.")] = "",
    seed: Annotated[
        list[int] | None, typer.Option(min=0, metavar="N", help="Of this training; several or 0, 1, 2 to collect.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.001, help="Of training; start-up and scoring come on top.")] = 10.0,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which this process saves and leaves; the same command goes on.")
    ] = 86_400.0,
    official: Annotated[Path | None, typer.Option(help="A checkout of github.com/Gsunshine/py-meanflow.")] = None,
    gpus: Gpus = None,
    collect: Annotated[bool, typer.Option("--collect", help="Build the result of all runs that are there.")] = False,
    scale: Annotated[str, typer.Option(metavar="gpu|smoke", help="Real sizes, or seconds on a CPU.")] = "gpu",
    runs: Runs = Path("runs/time-to-quality"),
    out: Out = None,
) -> None:
    """Quality against time beside the official code: one process a code and seed, or all on --gpus; then --collect."""
    if collect == bool(code or gpus is not None):
        raise ConfigError(
            "expected --code fullstride|official, to train, or --gpus N,N, for all trainings, or --collect alone"
        )
    if code and gpus is None and len(seed or []) != 1:
        raise ConfigError(f"--code {code}: expected one --seed; every process makes one training")
    with leaving_on_sigterm():
        from fullstride.meanflow.experiments import race
        from fullstride.meanflow.experiments.spec import SEEDS

        asked, seeds = race.Asked(scale, minutes, runs, tuple(overrides or ())), tuple(dict.fromkeys(seed or SEEDS))
        if code and gpus is None:
            race.run(code, seeds[0], asked, limit, official)
            return
        if gpus is not None:
            spread(gpus, _trainings(asked, (code,) if code else race.CODES, seeds, official), runs, collect, limit)
        from fullstride.bench.experiment_table import show
        from fullstride.bench.experiments import write_experiment
        from fullstride.meanflow.experiments.race_result import gather

        result = gather(asked, seeds)
        show(result, write_experiment(result, results_folder(out, scale, runs)))


def _trainings(asked: "Asked", codes: Sequence[str], seeds: Sequence[int], official: Path | None) -> Lines:
    """A line for each training, both codes of a seed beside each other; what cannot be is told before any begins."""
    for code in codes:
        asked.check(code, seeds[0], official)
    rest = options(minutes=asked.minutes, official=official, scale=asked.scale, runs=asked.runs)
    return {
        f"{code}-{seed}": ["time-to-quality", *asked.overrides, *options(code=code, seed=seed), *rest]
        for seed in seeds
        for code in codes
    }


@app.command()
def bert(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, as `fullstride bert train` takes them, for all models.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="SIZE", help="One each; base6 and base if absent, on a CPU tiny and mini."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.001, help="Of training, for each model.")] = 20.0,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which this process saves and leaves; the same command goes on.")
    ] = 86_400.0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and masks.")] = 0,
    gpus: Gpus = None,
    collect: Collect = False,
    scale: Annotated[str, typer.Option(metavar="gpu|cpu|smoke", help="Real sizes, a CPU's, or seconds.")] = "gpu",
    runs: Runs = Path("runs/bert-experiment"),
    out: Out = None,
) -> None:
    """Masked language modelling of 6 and 12 layers on real text: loss, bits a byte, and the cost of calling a step."""
    with leaving_on_sigterm():
        from fullstride.bench.experiment_table import show
        from fullstride.bench.experiments import write_experiment
        from fullstride.bert import experiment
        from fullstride.bert.experiment_result import gather

        until, models = time.monotonic() + limit, tuple(dict.fromkeys(model or ()))
        asked = experiment.Asked(scale, models, minutes, seed, runs, tuple(overrides or ()))
        if gpus is not None:
            for one in asked.models:
                asked.settings(one, experiment.NOMINAL)  # what cannot be is told before any begins
            rest = options(minutes=minutes, seed=seed, scale=scale, runs=runs, out=runs / "logs" / "results")
            lines = {one: ["bert", *asked.overrides, *options(model=one), *rest] for one in asked.models}
            spread(gpus, lines, runs, collect, limit)
        for one in () if collect or gpus is not None else asked.models:
            experiment.run(one, asked, until)
        result = gather(asked)
        show(result, write_experiment(result, results_folder(out, scale, runs)))
