"""Which cases each of the step's tables has."""

from benchmarks.cases.meanflow.options import BACKENDS
from benchmarks.cases.meanflow.step_alternatives import alternatives, compiler_mode, plain_operations
from benchmarks.cases.meanflow.step_cases import Case
from benchmarks.cases.meanflow.step_passes import Pass
from benchmarks.cases.meanflow.step_setup import Setup
from fullstride.errors import ConfigError

RATIOS = (1.0, 0.75, 0.25, 0.5)  # what is asked for most comes first, as time may run out
SHARES = (0.25, 0.5, 0.75, 1.0)
BATCHES = (16, 32, 64, 128, 256, 512)
FLOW_MATCHING = "FM MSE"


def name_of(ratio: float) -> str:
    """Of a MeanFlow step."""
    return f"MeanFlow {ratio:.0%}"


def counts_of(size: int) -> dict[int, float]:
    """How many of a batch's samples each of `SHARES` is, one at least; of shares of as many samples the largest."""
    return {max(1, round(share * size)): share for share in SHARES}


def flow_matching(setup: Setup, batch: int | None = None) -> Case:
    """The step that all are compared with: every weight 1."""
    return Case(FLOW_MATCHING, setup.loss(0.0, weighting_power=0.0), batch=batch)


def meanflow(setup: Setup, ratio: float, batch: int | None = None) -> Case:
    """A MeanFlow step with that share in the JVP, as a run takes it by default."""
    return Case(name_of(ratio), setup.loss(ratio, split="shared"), batch=batch)


def cases_of(section: str, setup: Setup) -> list[Case | Pass]:
    """The cases of a section, flow matching first."""
    first = flow_matching(setup)
    if section == "ratios":
        steps = [meanflow(setup, ratio) for ratio in RATIOS]
        # MeanFlow at 0 is flow matching with adaptive weights.
        passes = [Pass("forward", "forward"), Pass("JVP", "jvp"), Pass("JVP, prediction's graph kept", "target")]
        return [first, *steps, meanflow(setup, 0.0), *passes]
    if section == "backends":
        return [first, meanflow(setup, 0.25), meanflow(setup, 1.0)]
    if section == "alternatives":
        return [first, *alternatives(setup)]
    if section == "autotune":
        return [first, meanflow(setup, 1.0), compiler_mode(setup, "max-autotune")]
    if section == "scaling":
        size = setup.options.batch_size
        passes = [Pass("JVP", "jvp", batch=count) for count in counts_of(size)]
        return [first, *(meanflow(setup, share) for share in SHARES), *passes]
    if section == "batches":
        return [make for size in BATCHES for make in (flow_matching(setup, size), meanflow(setup, 1.0, size))]
    return [first, meanflow(setup, 1.0), plain_operations(setup)]  # profile


def backends_of(section: str, setup: Setup) -> tuple[str, ...]:
    """By which a section's cases are run: those of `backends` by all."""
    return BACKENDS if section == "backends" and setup.device.type == "cuda" else setup.backends


def chosen(case: Case | Pass, only: tuple[str, ...]) -> bool:
    """Whether a case is among those asked for; flow matching always is, for the ratios' sake."""
    return not only or case.name == FLOW_MATCHING or _named(case.name, only)


def _named(name: str, only: tuple[str, ...]) -> bool:
    return any(part.lower() in name.lower() for part in only)


def expect_chosen(setup: Setup) -> None:
    """See that `--only` asks for something, before anything is measured: flow matching alone compares with nothing.

    Raises:
        ConfigError: if no row of the sections has any of its parts in its name.

    """
    only = setup.options.only
    names = dict.fromkeys(case.name for section in setup.options.sections for case in cases_of(section, setup))
    if only and not any(_named(name, only) for name in names):
        raise ConfigError(
            f"--only {', '.join(only)}: no row has that in its name; expected parts of {'; '.join(names)}"
        )
