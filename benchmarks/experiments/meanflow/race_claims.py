"""Records of the compared runs, and the verdict on each claim that was made beforehand."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.experiments.meanflow.jobs import name_of
from benchmarks.experiments.meanflow.race_asked import EULER, SHARE, SHORT, VARIANTS, RaceRequest
from benchmarks.experiments.meanflow.record import MARKS, best
from benchmarks.harness.seeds import Claim, mean, seeds_in_words

# By seed.
Records = dict[int, dict[str, Any]]
# `marks` or `moments` of a record, and which of them.
Place = tuple[str, int]
CLOCKS = {"seconds": "seconds of training", "with start-up": "seconds with start-up"}
SOLVER = name_of(EULER)
# One step's distance over 50 Euler steps'.
WITHIN = 1.1
NONE_OF_BOTH = "no seed was run to its end by both codes"


def read_records(asked: RaceRequest, code: str, seeds: tuple[int, ...]) -> Records:
    """Read the records of a code's runs that reached a mark; ConfigError if one was run with other settings."""
    records = {seed: best(asked.record(code, seed).values) for seed in seeds}
    return {seed: record for seed, record in records.items() if record["marks"]}


def completed(records: Records) -> Records:
    """Return the records that have reached all marks."""
    return {seed: record for seed, record in records.items() if len(record["marks"]) >= MARKS}


def comparable(records: Records) -> Records:
    """Return the records for means over time: the complete ones if any, as an incomplete one would cut them."""
    return completed(records) or records


def over_seeds(records: Records, at: Place, value: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    """Return a number of a mark or a moment, by seed."""
    kind, i = at
    return {seed: float(value(record[kind][i])) for seed, record in records.items() if i < len(record[kind])}


def places(records: Records, has: Callable[[Iterable[int]], int]) -> list[Place]:
    """Return the marks and moments that any or all seeds, as `has` says, have reached."""
    return [(kind, i) for kind in ("marks", "moments") for i in range(has(len(r[kind]) for r in records.values()))]


def line(records: Records, metric: str, clock: str) -> list[tuple[float, float]]:
    """Return the mean over seeds at each common mark and moment, by time."""
    points = []
    for at in places(records, min):
        x = over_seeds(records, at, lambda m: m[clock])
        y = over_seeds(records, at, lambda m: m["scores"][metric])
        points.append((mean(list(x.values())), mean(list(y.values()))))
    return sorted(points)


def judged(complete: dict[str, Records], minutes: float, metrics: list[str], *, decays: bool = False) -> list[Claim]:
    """Return the claims, judged on means over the seeds that both codes have completed.

    `complete` are the runs that have reached all marks. If the rate `decays` over each training's time, the end of
    `SHORT` is compared.
    """
    theirs, codes = complete.get("official", {}), ["fullstride", *(code for code in VARIANTS if code in complete)]
    if decays:
        both = _of_both(complete.get(SHORT, {}), theirs)
        found = [_given_less(*both, metric, minutes) for metric in metrics]
    else:
        pairs = {code: _of_both(complete.get(code, {}), theirs) for code in codes}
        asked = [(code, metric, clock) for code in codes for metric in metrics for clock in CLOCKS.items()]
        found = [_reached(code, *pairs[code], metric, *clock, minutes) for code, metric, clock in asked]
    return [*found, *(_near_the_solver(code, complete.get(code, {}), metric) for code in codes for metric in metrics)]


def _of_both(ours: Records, theirs: Records) -> tuple[Records, Records]:
    both = sorted(ours.keys() & theirs.keys())
    return {seed: ours[seed] for seed in both}, {seed: theirs[seed] for seed in both}


def _last(records: Records, metric: str) -> float:
    return mean([record["marks"][MARKS - 1]["scores"][metric] for record in records.values()])


def _given_less(ours: Records, theirs: Records, metric: str, minutes: float) -> Claim:
    claim = (
        f"{metric} of fullstride, given {SHARE * 60 * minutes:g} seconds of training, is at most that of the official "
        f"code, given {60 * minutes:g}"
    )
    if not (ours and theirs):
        return Claim(claim, NONE_OF_BOTH, None)
    one, other = _last(ours, metric), _last(theirs, metric)
    return Claim(claim, f"{one:.4g} beside {other:.4g} ({seeds_in_words(ours)})", one <= other)


def _reached(code: str, ours: Records, theirs: Records, metric: str, clock: str, text: str, minutes: float) -> Claim:
    budget = 60 * minutes
    claim = f"{metric} of the official code after {budget:g} {text} is reached by {code} in at most {SHARE * budget:g}"
    if not (ours and theirs):
        return Claim(claim, NONE_OF_BOTH, None)
    within = [y for x, y in line(theirs, metric, clock) if x <= budget * 1.01]
    if not within:
        return Claim(claim, f"the official code has no mark within {budget:g} {text}", None)
    target, over = within[-1], seeds_in_words(ours)
    reached = next((x for x, y in line(ours, metric, clock) if y <= target), None)
    if reached is None:
        return Claim(claim, f"{target:.4g} is not reached ({over})", False)
    return Claim(claim, f"{target:.4g} is reached after {reached:.0f} s ({over})", reached <= SHARE * budget * 1.01)


def _near_the_solver(code: str, ours: Records, metric: str) -> Claim:
    claim = f"{metric} of one step of {code} is at most {WITHIN:g} x that of 50 Euler steps of the same weights"
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
