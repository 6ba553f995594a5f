"""Tables of the planning page: what the papers' runs would take, and the predictions beside what was measured."""

from pathlib import Path


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    ruler = ("---", *["---:"] * (len(header) - 1))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


def plans() -> str:
    """The papers' runs on one GPU of the machine that the factors were fitted on."""
    from fullstride.meanflow.planning.command import COLUMNS, cells, published

    return _markdown(COLUMNS, [cells(name, plan) for name, plan in published().items()])


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
