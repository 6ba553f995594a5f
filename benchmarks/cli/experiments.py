"""`python -m benchmarks NAME`: experiments over several seeds; a command imports what it runs only when it runs."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import experiments
from benchmarks.harness.options import Names
from benchmarks.harness.result_paths import MINUTES_OF, PHASES, SEEDS, foreign, narrower, results_folder
from benchmarks.harness.time_limit import Limit
from fullstride.cli.from_dataclass import command_from
from fullstride.cli.help import App
from fullstride.errors import ConfigError
from fullstride.process.signals import leaving_on_sigterm

if TYPE_CHECKING:
    from benchmarks.experiments.bert.experiment import BertRequest
    from benchmarks.experiments.gpu_pool import Task
    from benchmarks.experiments.meanflow.race_asked import RaceRequest
    from benchmarks.harness.seeds import ExperimentResult

DECLARED: dict[str, Any] = tomllib.loads((Path(experiments.__file__).parent / "meanflow" / "phases.toml").read_text())
GROUPS = {"Experiments": "overfit sanity ablations objectives weightings newer time-to-quality bert"}
app = App("Run an experiment over several seeds: mean, spread, JSON.", GROUPS)

Scale = Annotated[str, "Scale of the experiment: seconds, minutes on a CPU, or real sizes on a GPU.", "smoke|cpu|gpu"]
Seconds = Annotated[
    float,
    typer.Option(
        "--limit",
        min=1,
        metavar="SECONDS",
        show_default=False,
        help="Seconds until the command has saved everything and exited; the same command resumes [default: none].",
    ),
]
Collect = Annotated[bool, typer.Option("--collect", help="Run nothing; write the result of the finished runs.")]
Runs = Annotated[Path, "Folder of the runs; finished ones are not run again."]
Out = Annotated[
    Path | None, "Folder for the JSON [default: benchmarks/results; RUNS/results for smoke or non-default options]."
]
SPREAD = "GPUs of this machine for the trainings: one process on each, with its share of the cores"
Gpus = Annotated[str | None, f"{SPREAD}.", "N,N"]


def words_of(**given: Any) -> list[str]:
    """Return a command's options as arguments: `--name value`, once per item of a sequence, none for None."""
    words = []
    for name, value in given.items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        words += [word for one in values if one is not None for word in (f"--{name}", str(one))]
    return words


def _minutes(given: float | None, scale: str, usual: float) -> float:
    """Return the training minutes: as given, else the experiment's default, or three seconds for a smoke test."""
    return given or (0.05 if scale == "smoke" else usual)


@dataclass(frozen=True)
class PhaseOptions:
    """Options of the experiments on MeanFlow's settings."""

    overrides: Annotated[
        Names,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings of all trainings, e.g. data=cifar10; the JSON then stays in RUNS."
        ),
    ] = ()
    scale: Scale = "cpu"
    parts: Annotated[
        tuple[str, ...], typer.Option("--part", metavar="NAME", help="Part to run; may be repeated. All if not given.")
    ] = ()
    arms: Annotated[
        tuple[str, ...],
        typer.Option("--arm", metavar="NAME", help="Arm to run, with its teacher; may be repeated. All if not given."),
    ] = ()
    seeds: Annotated[tuple[int, ...], typer.Option("--seed", min=0, metavar="N", help="Seed; may be repeated.")] = SEEDS
    gpus: Annotated[str | None, f"{SPREAD}; a GPU that is named twice, as in 0,0, runs two at a time.", "N,N"] = None
    collect: Collect = False
    limit: Seconds = math.inf
    runs: Runs = Path("runs/experiments")
    out: Out = None


def _phase(options: PhaseOptions, name: str) -> None:
    limit = Limit.of_command(options.limit)
    with leaving_on_sigterm():
        from benchmarks.experiments.meanflow import phases
        from benchmarks.experiments.meanflow.phase import ExperimentRequest, count_missing, gathered, run, trainings

        seeds, runs, given = tuple(dict.fromkeys(options.seeds)), options.runs, options.overrides
        runs_nothing = options.collect or options.gpus is not None
        asked = ExperimentRequest(options.scale, options.parts, seeds, runs_nothing, runs, given, options.arms)
        asked.check(name)
        folder = results_folder(options.out, options.scale, runs, [*given, *narrower(name, seeds=seeds)])
        if options.gpus is None:
            run(name, asked, folder, limit)
            return
        from benchmarks.experiments.gpu_pool import Task, spread
        from benchmarks.harness.seeds import conclude

        # They take trainings until none is left. What each finds alone is no result, and stays beside its log.
        rest = words_of(
            scale=options.scale, part=options.parts, arm=options.arms, runs=runs, out=runs / "logs" / "results"
        )
        words = ["benchmarks", name, *given, *words_of(seed=seeds), *rest]
        count = min(count_missing(name, asked), len(options.gpus.split(",")))
        tasks = [Task(f"{name}-{lane}", words) for lane in range(count)]
        device = trainings(phases.PHASES[name], asked)[0].job.config.device
        spread(options.gpus, tasks, runs, options.collect, limit, device=device, shared=True)
        conclude(lambda: gathered(phases.PHASES[name], asked), folder, limit)


def _add_phase(title: str, name: str, about: str) -> None:
    def call(options: PhaseOptions) -> None:
        _phase(options, name)

    command = command_from(call, PhaseOptions)
    app.command(name, help=about, hidden=True)(command)
    app.command(title, help=about)(command)


for _title, _name in PHASES.items():
    _add_phase(_title, _name, DECLARED["experiments"][_name]["help"])


@dataclass(frozen=True)
class RaceOptions:
    """Compare quality by time with the official code: a process per code and seed, or --gpus; then --collect."""

    overrides: Annotated[
        Names,
        typer.Argument(metavar="KEY=VALUE", help="Settings of the recipe, for all codes; the JSON then stays in RUNS."),
    ] = ()
    code: Annotated[
        str,
        "Code to train in this process. fullstride-imf, -imf-ema, -labels, -imf-labels, -huber, -huber-labels, "
        "-huber-imf-labels, -alphaflow, -warmup, -muon and -imf-muon have other objectives, weights or optimizers, or "
        "use labels; -short trains for less time with a decaying learning rate.",
        "fullstride|official|fullstride-...",
    ] = ""
    seed: Annotated[
        tuple[int, ...],
        typer.Option(
            min=0, metavar="N", help="Seed of this training; with --collect, seeds to collect [default: 0, 1, 2]."
        ),
    ] = ()
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Minutes of training, without start-up and scoring [default: 10; seconds for smoke]."
        ),
    ] = None
    limit: Seconds = math.inf
    official: Annotated[Path | None, "Folder with a checkout of github.com/Gsunshine/py-meanflow."] = None
    gpus: Gpus = None
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing; build the result of all existing runs.")
    ] = False
    scale: Annotated[str, "Scale of the comparison: real sizes, or seconds on a CPU.", "gpu|smoke"] = "gpu"
    runs: Runs = Path("runs/time-to-quality")
    out: Out = None


def _race(options: RaceOptions) -> None:
    code, seed, gpus, official = options.code, options.seed, options.gpus, options.official
    end = Limit.of_command(options.limit)
    if options.collect == bool(code or gpus is not None):
        raise ConfigError(
            "expected --code fullstride|official|... (one training), --gpus N,N (all trainings) or --collect"
        )
    if code and gpus is None and len(seed) != 1:
        raise ConfigError(f"--code {code}: expected exactly one --seed, because a process runs one training")
    with leaving_on_sigterm():
        from benchmarks.experiments.meanflow import race
        from benchmarks.experiments.meanflow.race_asked import RaceRequest

        name, scale, runs = "time-to-quality", options.scale, options.runs
        asked = RaceRequest(scale, _minutes(options.minutes, scale, MINUTES_OF[name]), runs, options.overrides)
        seeds = tuple(dict.fromkeys(seed or SEEDS))
        if code and gpus is None:
            with end.kept():
                race.run(code, seeds[0], asked, end, official)
            return
        if gpus is not None:
            from benchmarks.experiments.gpu_pool import spread

            codes = (code,) if code else asked.codes
            tasks = _trainings(asked, codes, seeds, official, end)
            spread(gpus, tasks, runs, options.collect, end, device=asked.config(codes[0], seeds[0]).device)
        # Not before the runs, which keep digests of all code that their process has loaded.
        from benchmarks.experiments.meanflow import race_result
        from benchmarks.harness.seeds import conclude

        other = [*foreign(name, asked.overrides), *narrower(name, seeds=seeds, minutes=options.minutes)]
        folder = results_folder(options.out, scale, runs, other)
        conclude(lambda: race_result.gather(asked, seeds), folder, end)


def _trainings(
    asked: "RaceRequest", codes: Sequence[str], seeds: Sequence[int], official: Path | None, limit: Limit
) -> "list[Task]":
    """Return a task per incomplete training, ordered by seed and then by code, after checking that each can run."""
    from benchmarks.experiments.gpu_pool import Task

    imports = limit.spent  # as this process has taken, so will each of them

    for code in codes:
        asked.check(code, seeds[0], official)
    rest = words_of(minutes=asked.minutes, official=official, scale=asked.scale, runs=asked.runs)
    return [
        Task(
            f"{code}-{seed}",
            ["benchmarks", "time-to-quality", *asked.overrides, *words_of(code=code, seed=seed), *rest],
            imports + (asked.start_of(code) if asked.begins_anew(code, seed) else 0.0),
        )
        for seed in seeds
        for code in codes
        if not asked.is_complete(code, seed)
    ]


@dataclass(frozen=True)
class BertOptions:
    """Train masked language models of 6 and 12 layers: loss, bits per byte, and the cost of calling a step."""

    overrides: Annotated[
        Names,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings, as for `fullstride bert train`; the JSON then stays in RUNS."
        ),
    ] = ()
    model: Annotated[
        Names,
        typer.Option(
            "--model",
            metavar="SIZE",
            help="Size of the model; may be repeated [default: base6 and base; tiny and mini on a CPU].",
        ),
    ] = ()
    minutes: Annotated[
        float | None,
        typer.Option(min=0.001, help="Minutes of training for each model [default: 20; seconds for smoke]."),
    ] = None
    limit: Seconds = math.inf
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and masks.")] = 0
    gpus: Gpus = None
    collect: Collect = False
    scale: Annotated[str, "Scale of the experiment: real sizes, sizes for a CPU, or seconds.", "gpu|cpu|smoke"] = "gpu"
    runs: Runs = Path("runs/bert-experiment")
    out: Out = None


def _bert(options: BertOptions) -> None:
    end, scale, runs = Limit.of_command(options.limit), options.scale, options.runs
    with leaving_on_sigterm():
        from benchmarks.experiments.bert import experiment
        from benchmarks.harness.seeds import conclude

        models, minutes = tuple(dict.fromkeys(options.model)), _minutes(options.minutes, scale, MINUTES_OF["bert"])
        asked = experiment.BertRequest(scale, models, minutes, options.seed, runs, options.overrides)
        work = None
        if options.gpus is not None:
            from benchmarks.experiments.gpu_pool import spread

            device = asked.settings(asked.models[0], experiment.NOMINAL).device
            spread(options.gpus, _models(asked), runs, options.collect, end, device=device)
        elif not options.collect:
            work = lambda: [experiment.run(one, asked, end) for one in asked.models]  # noqa: E731

        def gathered() -> "ExperimentResult":
            # Not before the runs, which keep digests of all code that their process has loaded.
            from benchmarks.experiments.bert.result import gather

            return gather(asked)

        less = narrower("bert", seeds=(options.seed,), minutes=options.minutes, models=options.model)
        folder = results_folder(options.out, scale, runs, [*foreign("bert", asked.overrides), *less])
        conclude(gathered, folder, end, work)


def _models(asked: "BertRequest") -> "list[Task]":
    """Return a task per model, after checking that each can run."""
    from benchmarks.experiments.bert.experiment import NOMINAL
    from benchmarks.experiments.gpu_pool import Task

    for one in asked.models:
        asked.settings(one, NOMINAL)
    place = words_of(runs=asked.runs, out=asked.runs / "logs" / "results")
    rest = [*words_of(minutes=asked.minutes, seed=asked.seed, scale=asked.scale), *place]
    return [Task(one, ["benchmarks", "bert", *asked.overrides, *words_of(model=one), *rest]) for one in asked.models]


app.command("time-to-quality")(command_from(_race, RaceOptions))
app.command("bert")(command_from(_bert, BertOptions))
