"""`python -m benchmarks train-step`: cost of calling a training step, by the way of calling it.

`host` is dispatch alone, on a tree of BERT's shape whose step rewrites each array once; `leaves` is the same against
the number of arrays, `static` with static fields in place of leaves, `law` from 20 arrays to 5,000 with a fit, and
`nnx` of a Flax NNX module beside Flax's own ways. `saving` is a loop whose device works for 5 to 100 ms a step; `step`
is a BERT's real step beside its bare executable.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.cases.step_jax.ceilings import jax_ceilings, platform
from benchmarks.cases.step_jax.host import Times, host_times, law, parts, product_ms, slope
from benchmarks.cases.step_jax.nnx_ways import NNX_WAYS, nnx_tree
from benchmarks.cases.step_jax.options import USUAL, TrainStepOptions
from benchmarks.cases.step_jax.real import NAMES, StepTimes, over, step_times, verdict
from benchmarks.cases.step_jax.table import (
    break_even,
    fit_lines,
    host_table,
    judged,
    parts_table,
    step_table,
    target_lines,
)
from benchmarks.cases.step_jax.ways import BARE, FLAT, WAYS
from benchmarks.cases.step_jax.workload import StaticDropout, Workload, busy, tower, tree
from benchmarks.harness.budget import NO_TIME, Budget, say
from benchmarks.harness.environment import environment, slug, xla_flags
from benchmarks.harness.results import CaseResult, Row, at, write_result
from benchmarks.harness.table import console_of
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Ceilings
from fullstride.measure.timing import Timing

# Ways that the sections about trees compare.
SOME = ("filter_jit", "filter_jit patched", "filter_jit + Optimizer", "hoisted partition", FLAT)
OURS = ("cached_filter_jit", "cached_filter_jit donated", "make_train_step", "TrainStep", "TrainStep grouped")
TRAIN_STEPS = OURS[-2:]
SIZES = ("tiny", "base", "large")
# Layers of the law's towers: 19 to 4,981 arrays.
TOWERS = (2, 9, 32, 99, 329, 829)
LAW = ("filter_jit", "filter_jit donated", FLAT, *OURS)
# Milliseconds that the device works in a step of the loops whose saving is measured.
WORK = (5, 20, 100)
SAVING = (BARE, *TRAIN_STEPS, "cached_filter_jit donated", "filter_jit donated", "filter_jit")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# A step's median may be this much longer than the bare executable's.
WITHIN = 1.01
# The tree that the targets are set for.
JUDGED = "base"
# Makes the workload of a size and mode.
Network = Callable[[TrainStepOptions, str], Workload]


def run(options: TrainStepOptions, network: Network, out: Path) -> list[Path]:
    """Check, measure, print the tables and write a JSON for each section.

    `network` makes the real step's workload of (options, mode). ConfigError if no way has a requested name, or a
    section has no row; the others are written before. GateError if two ways train differently.
    """
    budget, console = Budget.of(options.seconds), console_of(150)
    written, without = [], []
    for section in options.sections:
        if budget.spent and section != options.sections[0]:
            say(f"left out: {section}: {NO_TIME}")
            continue
        result = MEASURED[section](options, network, budget)
        if not result.rows:
            without.append(result)
            continue
        written.append(write_result(result, out))
        for table in (
            (step_table(result),) if section in ("step", "saving") else (host_table(result), parts_table(result))
        ):
            if table.row_count:
                console.print(table)
        for line in (*target_lines(result), *fit_lines(result), f"written to {written[-1]}"):
            console.print(line, highlight=False, soft_wrap=True)
    for result in without:
        write_result(result, out)  # which says why
    return written


def run_bert(options: TrainStepOptions, out: Path) -> None:
    """Run on BERT's real step; see `run`."""
    from benchmarks.cases.bert.workload import workload

    def network(options: TrainStepOptions, mode: str) -> Workload:
        return workload(options.model, mode, options.precision, options.batch_size, options.length)

    run(options, network, out)


def _chosen(options: TrainStepOptions, names: tuple[str, ...], always: str) -> tuple[str, ...]:
    # By a part of its name, or by `=` and all of it.
    meant = [name for name in names if any(one == f"={name}" or one in name for one in options.only)]
    if options.only and not meant:
        raise ConfigError(
            f"--only {', '.join(options.only)}: no way has this in its name; expected parts of {', '.join(names)}"
        )
    return tuple(name for name in names if name == always or not options.only or name in meant)


def _result(
    options: TrainStepOptions,
    section: str,
    rows: list[Row],
    ceilings: Ceilings,
    gate: dict[str, float],
    **conditions: Any,
) -> CaseResult:
    shown = {"rows": slug(" ".join(options.only))} if options.only else {}
    given = {"model": options.model, "section": section, **shown, **conditions}
    if other := at(xla=(xla_flags(), "")):
        given["at"] = "-".join(filter(None, (given.get("at"), other["at"])))
    return CaseResult("train-step", platform(), given, gate, ceilings, rows, environment())


def _row(name: str, workload: Workload, times: Times, all_times: dict[str, Times], ceilings: Ceilings) -> Row:
    extra: dict[str, Any] = {"arrays": len(workload.arrays())}
    extra |= {"host": _short(times.host), "ready": _short(times.ready)}
    if FLAT in all_times:
        extra["over_flat"] = over(times.cpu.samples_ms, all_times[FLAT].cpu.samples_ms)
    plain = all_times.get("filter_jit")
    if plain is not None and times is not plain:
        first, step, other, slow = times.cpu.first_ms, times.ready.median_ms, plain.cpu.first_ms, plain.ready.median_ms
        extra["break_even"] = break_even(first, step, other, slow)
    return Row(name, times.cpu, workload.floor(ceilings), extra)


def _short(timing: Timing) -> dict[str, Any]:
    """Return a timing without its samples."""
    return {"median_ms": timing.median_ms, "p10_ms": timing.quantile(0.1), "p90_ms": timing.quantile(0.9)}


def _host(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    workload, ceilings = tree(options.model), jax_ceilings()
    times = host_times(workload, _chosen(options, tuple(WAYS), FLAT), options.calls)
    rows = [_row(name, workload, t, times, ceilings) for name, t in times.items()]
    for name, timing in parts(workload, options.calls).items():
        rows.append(Row(name, timing, workload.floor(ceilings), {"part": True}))
    gate = {name: t.gate for name, t in times.items()}
    targets = judged(times) if options.model == JUDGED else []
    return _result(options, "host", rows, ceilings, gate, calls=options.calls, targets=targets)


def _trees(
    options: TrainStepOptions, section: str, workloads: dict[str, Workload], names: tuple[str, ...] = (*SOME, *OURS)
) -> tuple[CaseResult, dict[str, dict[int, float]]]:
    """Measure a section on several trees by label; also return each way's time by number of arrays."""
    ceilings, rows, gate = jax_ceilings(), [], {}
    found: dict[str, dict[int, float]] = {}
    for label, workload in workloads.items():
        times = host_times(workload, _chosen(options, names, FLAT), options.calls)
        gate |= {f"{name}, {label}": t.gate for name, t in times.items()}
        for name, t in times.items():
            rows.append(_row(f"{name}, {label}", workload, t, times, ceilings))
            found.setdefault(name, {})[len(workload.arrays())] = t.cpu.median_ms
    return _result(options, section, rows, ceilings, gate, calls=options.calls), found


def _leaves(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    """Measure whether the overhead grows linearly with the number of leaves."""
    result, found = _trees(options, "leaves", {size: tree(size) for size in SIZES})
    fits = {name: slope(list(ms), list(ms.values())) for name, ms in found.items()}
    shown = {name: {"us_per_array": us, "ms_at_none": ms} for name, (us, ms) in fits.items()}
    result.conditions["fits"] = shown
    return result


def _static(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    """Measure whether making non-array leaves static fields helps."""
    return _trees(options, "static", {"leaves": tree(options.model), "static": tree(options.model, StaticDropout)})[0]


def _law(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    """Fit the cost of an array from 19 to 4,981 of them."""
    result, found = _trees(options, "law", {work.name: work for work in map(tower, TOWERS)}, LAW)
    result.conditions["fits"] = {name: law(list(ms), list(ms.values())) for name, ms in found.items()}
    return result


def _nnx(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    """Measure a Flax NNX module's step beside Flax's own ways."""
    names = *NNX_WAYS, FLAT, *TRAIN_STEPS
    return _trees(options, "nnx", {options.model: nnx_tree(options.model)}, names)[0]


def _saving(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    """Measure loops whose device works for some milliseconds a step: what of the host's time shows in them."""
    ceilings, rows, gate, savings = jax_ceilings(), [], {}, {}
    names, one = _chosen(options, SAVING, BARE), product_ms()
    for i, ms in enumerate(WORK):
        workload = busy(tree(options.model), max(1, round(ms / one)))
        share = Budget.of((budget.until - time.monotonic()) / (len(WORK) - i))
        times = step_times(workload, names, "fp32", share)
        gate |= {f"{name}, {ms} ms": t.gate for name, t in times.items()}
        rows += [_step_row(f"{name}, {ms} ms", workload, t, times, ceilings) for name, t in times.items()]
        if "filter_jit" in times:
            plain = times["filter_jit"].free.median_ms
            savings |= {f"{name}, {ms} ms": 1 - t.free.median_ms / plain for name, t in times.items()}
        jax.clear_caches()
    return _result(options, "saving", rows, ceilings, gate, savings=savings)


def _step(options: TrainStepOptions, network: Network, budget: Budget) -> CaseResult:
    """Measure the real step in all requested modes."""
    ceilings, rows, gate = jax_ceilings(DTYPES[options.precision]), [], {}
    names, left_out = _chosen(options, NAMES, BARE), list[dict[str, str]]()
    for i, mode in enumerate(options.modes):
        if rows and budget.spent:
            left_out += [{"name": f"{name}, {mode}", "why": NO_TIME} for name in names]
            continue
        workload = network(options, mode)
        share = Budget.of((budget.until - time.monotonic()) / (len(options.modes) - i))
        profile = options.profile and options.profile / mode
        times = step_times(workload, names, options.precision, share, profile=profile)
        left_out += [{"name": f"{name}, {mode}", "why": NO_TIME} for name in names if name not in times]
        gate |= {f"{name}, {mode}": t.gate for name, t in times.items()}
        rows += [_step_row(f"{name}, {mode}", workload, t, times, ceilings) for name, t in times.items()]
        jax.clear_caches()
    only = {} if set(options.modes) == set(USUAL) else {"mode": "-".join(options.modes)}
    sizes: dict[str, Any] = {**only, "precision": options.precision, "batch_size": options.batch_size}
    sizes["length"] = options.length
    if (options.batch_size, options.length) != (TrainStepOptions.batch_size, TrainStepOptions.length):
        sizes["at"] = f"{options.batch_size}x{options.length}"
    sizes |= {"xla_flags": xla_flags(), "left_out": left_out}
    return _result(options, "step", rows, ceilings, gate, **sizes)


def _step_row(name: str, workload: Workload, t: StepTimes, times: dict[str, StepTimes], ceilings: Ceilings) -> Row:
    bare, plain = times[BARE], times.get("filter_jit")
    blocked, free = over(t.rounds, bare.rounds), over(t.free.samples_ms, bare.free.samples_ms)
    cpu = over(t.cpu_rounds, bare.cpu_rounds)
    extra: dict[str, Any] = {"arrays": len(workload.arrays()), "workload": workload.name}
    extra |= {"free": t.free.to_dict(), "cpu": t.cpu.to_dict(), **t.notes}
    extra |= {"over_bare": blocked, "free_over_bare": free, "cpu_over_bare": cpu}
    # On a shared processor its time says more than the clock; a device's work is not in it.
    extra["within"] = verdict([cpu] if platform() == "cpu" else [blocked, free], WITHIN)
    if plain is not None and t is not plain:
        step, slow = t.free.median_ms, plain.free.median_ms
        extra["break_even"] = break_even(t.blocked.first_ms, step, plain.blocked.first_ms, slow)
    return Row(name, t.blocked, workload.floor(ceilings), extra)


MEASURED = {
    "host": _host,
    "leaves": _leaves,
    "static": _static,
    "law": _law,
    "saving": _saving,
    "nnx": _nnx,
    "step": _step,
}
