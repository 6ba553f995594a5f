"""What was claimed of the comparison beforehand, and what became of it."""

from fullstride.bench.experiments import Claim, mean, seeds_in_words
from fullstride.meanflow.experiments.jobs import name_of
from fullstride.meanflow.experiments.race_asked import EULER
from fullstride.meanflow.experiments.race_records import CLOCKS, Records, line
from fullstride.meanflow.experiments.record import MARKS
from fullstride.meanflow.experiments.watch import MOMENTS

# Of the official code's time, in which fullstride is to reach its quality.
SHARE = MOMENTS[0]
SOLVER = name_of(EULER)
# One step's distance over 50 Euler steps'.
WITHIN = 1.1


def judged(complete: dict[str, Records], minutes: float, metrics: list[str]) -> list[Claim]:
    """The claims, judged on means over seeds: of both codes over those that both have completed.

    Args:
        complete: runs that have reached all marks, by code.
        minutes: of training.
        metrics: the distances.

    """
    ours, theirs = complete.get("fullstride", {}), complete.get("official", {})
    both = sorted(ours.keys() & theirs.keys())
    one, other = ({seed: records[seed] for seed in both} for records in (ours, theirs))
    found = [_reached(one, other, metric, *clock, minutes) for metric in metrics for clock in CLOCKS.items()]
    return [*found, *(_near_the_solver(ours, metric) for metric in metrics)]


def _reached(ours: Records, theirs: Records, metric: str, clock: str, text: str, minutes: float) -> Claim:
    budget = 60 * minutes
    claim = f"{metric} of the official code after {budget:g} {text} is reached in at most {SHARE * budget:g}"
    if not (ours and theirs):
        return Claim(claim, "no seed was run to its end by both codes", None)
    within = [y for x, y in line(theirs, metric, clock) if x <= budget * 1.01]
    if not within:
        return Claim(claim, f"the official code has no mark within {budget:g} {text}", None)
    target, over = within[-1], seeds_in_words(ours)
    reached = next((x for x, y in line(ours, metric, clock) if y <= target), None)
    if reached is None:
        return Claim(claim, f"{target:.4g} is not reached ({over})", False)
    return Claim(claim, f"{target:.4g} is reached after {reached:.0f} s ({over})", reached <= SHARE * budget * 1.01)


def _near_the_solver(ours: Records, metric: str) -> Claim:
    claim = f"{metric} of one step is at most {WITHIN:g} x that of 50 Euler steps of the same weights"
    pairs = {
        seed: (record["marks"][MARKS - 1]["scores"][metric], record["final"][SOLVER][metric])
        for seed, record in ours.items()
        if SOLVER in record["final"]
    }
    if not pairs:
        return Claim(claim, "not run", None)
    one, solver = (mean(list(values)) for values in zip(*pairs.values(), strict=True))
    found = f"{one:.4g} / {solver:.4g} = {one / solver:.2f} ({seeds_in_words(pairs)})"
    return Claim(claim, found, one <= WITHIN * solver)
