"""Tables of the planning page: what the papers' runs would take, and the predictions beside what was measured."""

from pathlib import Path

NAMES = {"bf16": "bf16", "tf32": "TF32", "fp32": "fp32"}
# Letters of the page's formula, what they are called in the code, and what they hold.
FACTORS = (
    ("c", "convolution", "convolutions, forward and backward together"),
    (
        "m",
        "product",
        "matrix products; below 1 as a network's larger ones run faster than the 8192-cube that R is measured on",
    ),
    ("a", "attention", "attention"),
    ("b", "moved", "norms and whatever the compiler fuses around them"),
    ("k", "call_us", "microseconds of a call: launch gaps, and kernels too small to fill the device"),
    ("tau", "tangent", "the tangent's pass beside a third of flow matching's step; why fp32's is slow is not known"),
    ("", "written", "of 4 bytes a number of every other operation, for a step that is recorded as it is written"),
    ("memory", "kept", "of what a step holds; in bf16 the compiler keeps fewer bytes than eager operations would"),
)


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]], text: tuple[int, ...] = ()) -> str:
    """A table whose first column and those of `text` are words, the others numbers."""
    ruler = tuple("---" if column in (0, *text) else "---:" for column in range(len(header)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


def plans() -> str:
    """The papers' runs on one GPU of the machine that the factors were fitted on."""
    from fullstride.cli.meanflow_plan import COLUMNS, cells, published

    return _markdown(COLUMNS, [cells(name, plan) for name, plan in published().items()])


def factors() -> str:
    """What was fitted, and to what kind of work it belongs; letters are those of the page's formula."""
    from fullstride.meanflow.planning.fit import fitted

    costs = fitted().costs
    rows = [(letter, _value(getattr(costs, name)), what) for letter, name, what in FACTORS]
    return _markdown(("factor", "", "what it holds"), rows, text=(2,))


def _value(factor: float | dict[str, float]) -> str:
    if isinstance(factor, dict):
        return ", ".join(f"{value:g} {NAMES[precision]}" for precision, value in factor.items())
    return f"{factor:g}"


def predicted(results: Path) -> str:
    """A row for each network, precision, backend and batch: how far the predictions of its steps are off."""
    from fullstride.meanflow.planning.cost import memory_bytes, step_ms
    from fullstride.meanflow.planning.fit import fitted
    from fullstride.meanflow.planning.measured import measured, work_for

    kept = fitted()
    groups: dict[tuple[str, ...], list[tuple[float, float, bool]]] = {}
    for row in measured(results):
        step, work = row.step, work_for(row)
        time = step_ms(work, step, kept.rates[step.precision], kept.costs) / row.ms - 1
        memory = memory_bytes(work, step, kept.costs) / row.memory - 1 if row.memory else 0.0
        key = (row.model, step.precision, step.backend, str(step.batch) + ", whole step" * step.whole)
        groups.setdefault(key, []).append((time, memory, row.fitted))
    header = ("network", "precision", "backend", "batch", "steps", "of them fitted", "time off by", "memory off by")
    rows = [
        (
            *key,
            str(len(found)),
            str(sum(f for *_, f in found)),
            _range(t for t, *_ in found),
            _range(m for _, m, _ in found),
        )
        for key, found in groups.items()
    ]
    return _markdown(header, rows)


def _range(errors) -> str:
    low, high = f"{100 * min(every := list(errors)):+.0f} %", f"{100 * max(every):+.0f} %"
    return low if low == high else f"{low} to {high}"
