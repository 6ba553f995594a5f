"""The README's table: a row or more an area."""

import contextlib
from dataclasses import replace

from benchmarks.report.doc_tables import race
from benchmarks.report.doc_tables.derivatives import newest_attention, peer
from benchmarks.report.doc_tables.engine import BESIDE, OURS, on_gpu
from benchmarks.report.doc_tables.equinox import BASE
from benchmarks.report.doc_tables.training import COMPILED, steps_on_gpu
from benchmarks.report.jvp_columns import FUSED_DUAL
from benchmarks.report.llm import rate
from benchmarks.report.markdown import MarkdownTable, the_experiment, the_result, the_row
from benchmarks.report.peer import READY, THEIRS
from benchmarks.report.reading import Folder, Measurement, Result
from benchmarks.report.tables import number
from fullstride.errors import ConfigError

LONG = "B1 H24 L16384 D128"
GROUPED = "TrainStep grouped"


def headlines(folder: Folder) -> MarkdownTable:
    """One row an area: what was measured, what stands beside it, and what the hardware asks."""
    table = MarkdownTable(("what", "fullstride", "beside it", "the roofline bound"))
    _training(table, folder)
    _quality(table, folder)
    _attention(table, folder)
    _equinox(table, folder)
    _serving(table, folder)
    return table


def _training(table: MarkdownTable, folder: Folder) -> None:
    result = steps_on_gpu(folder, COMPILED)
    flow, full = (the_row(result, f"{name}, compile+graph") for name in ("FM MSE", "MeanFlow 100%"))
    table.add(
        "a MeanFlow step with every sample in the Jacobian-vector product (JVP): U-Net of 52M weights, batch 64, bf16",
        _milliseconds(full),
        f"flow matching {number(flow.median)} ms: {number(full.median / flow.median, 3)} x, where the arithmetic asks "
        "for 1.33 x",
        f"{number(full.floor, 3)} ms",
        of=result,
    )
    _beside_the_official_code(table, folder)


def _beside_the_official_code(table: MarkdownTable, folder: Folder) -> None:
    result = the_result(folder, "meanflow-peer", device="cuda", rows=None)
    ours, tf32, theirs, ready = (
        the_row(result, name) for name in ("fullstride, bf16", "fullstride, tf32", THEIRS, READY)
    )
    table.add(
        "CIFAR-10's whole MeanFlow step: 55.9M weights, batch 128, augmentation, optimizer, three averages, bf16",
        _milliseconds(ours),
        f"in TF32: py-meanflow's own compiled step {number(theirs.median)} ms, {number(ready.median)} ms of batches "
        f"augmented before; fullstride {number(tf32.median)} ms",
        f"{number(ours.floor, 3)} ms",
        of=result,
    )


def _milliseconds(row: Measurement, digits: int = 4) -> str:
    """The median, with p10 and p90."""
    median, p10, p90 = (number(value, digits) for value in (row.median, row.p10, row.p90))
    return f"**{median} ms** ({p10} to {p90})"


def _tokens(row: Measurement) -> str:
    """Their rate by the median, with those by p90 and p10."""
    slow, fast = (rate(row) * row.median / ms for ms in (row.p90, row.p10))
    return f"**{rate(row):,.0f} tokens/s** ({slow:,.0f} to {fast:,.0f})"


def _quality(table: MarkdownTable, folder: Folder) -> None:
    result = the_experiment(folder, "experiment-time-to-quality--gpu")
    conditions = result.data["conditions"]
    (seconds, seeds), (started, _) = (race.reached(result, clock) for clock in (race.TRAINING, race.WITH_START))
    budget = f"{60 * conditions['minutes']:.0f} s"
    table.add(
        f"the quality that py-meanflow reaches in {budget}: {seeds} seeds of Fashion-MNIST",
        f"**{seconds:.0f} s** of training; {started:.0f} s with start-up",
        f"py-meanflow {budget} by the same clock",
        "",
        of=result,
    )


def _attention(table: MarkdownTable, folder: Folder) -> None:
    result = newest_attention(folder)
    ours = the_row(result, f"long128 {LONG} forward, ours")
    others = {"vanilla": "PyTorch's math attention under `torch.func.jvp`"}
    if any(row.name == f"long128 {LONG} forward, {FUSED_DUAL}" for row in result.rows):
        others = {FUSED_DUAL: FUSED_DUAL, **others}
    took = {
        who: peer(result, f"long128 {LONG}", "forward", who, lambda row: f"{number(row.median, 3)} ms")
        for who in others
    }
    table.add(
        "attention and its derivative: batch 1, 24 heads, 16,384 tokens, head dimension 128, bf16",
        f"{_milliseconds(ours)}, {number(ours.extra['gflop'] / ours.median, 3)} TFLOP/s",
        "; ".join(f"{name}: {took[who]}" for who, name in others.items()),
        f"{number(ours.floor, 3)} ms",
        of=result,
    )


def _equinox(table: MarkdownTable, folder: Folder) -> None:
    result = the_result(folder, "train-step", section="host", model="base", device="cuda")
    ours, usual = (the_row(result, name) for name in (GROUPED, "filter_jit"))
    table.add(
        f"the host's time to call an Equinox training step of {ours.extra['arrays']} arrays",
        _milliseconds(ours, 3),
        f"`filter_jit` {number(usual.median, 3)} ms",
        "",
        of=result,
    )
    steps = the_result(folder, "train-step", section="step", mode="sdpa", device="cuda", **BASE)
    ours, usual, donated = (the_row(steps, f"{way}, sdpa") for way in (GROUPED, "filter_jit", "filter_jit donated"))
    rows, length = (steps.conditions[size] for size in ("batch_size", "length"))
    table.add(
        f"BERT-base, a whole step of {rows * length:,} tokens, bf16",
        f"**{_in_a_loop(ours)} ms**",
        f"`filter_jit` donated {_in_a_loop(donated)} ms, not donated {_in_a_loop(usual)} ms",
        f"{number(ours.floor, 3)} ms",
        of=steps,
    )


def _in_a_loop(row: Measurement) -> str:
    """Milliseconds of an Equinox step in a loop that waits at its end alone."""
    return number(row.extra["free"]["median_ms"])


def _serving(table: MarkdownTable, folder: Folder) -> None:
    sections = (
        ("small", "plain", "Qwen3-0.6B's shape, 4 prompts at once, plain JAX"),
        ("small", "token", "the same, with the engine's CUDA kernels"),
        ("large", "token", "the same model, {prompts} prompts of nano-vllm's bench, with the engine's CUDA kernels"),
    )
    results = _of_one_machine(folder, [section[:2] for section in sections])
    for (_, _, what), result in zip(sections, results, strict=True):
        ours = the_row(result, OURS)
        table.add(
            what.format(**result.conditions),
            _tokens(ours),
            _fastest_beside(result),
            f"{rate(ours) * ours.over_floor:,.0f} tokens/s",
            of=result,
        )


def _of_one_machine(folder: Folder, sections: list[tuple[str, str]]) -> list[Result]:
    """All of one machine that has every section, as their speeds are compared: of the one that measured one last."""
    found = []
    for machine in dict.fromkeys(result.machine for result in folder.results):
        own = replace(folder, results=tuple(result for result in folder.results if result.machine == machine))
        with contextlib.suppress(ConfigError):  # one is not there
            found.append([on_gpu(own, *section, at=BESIDE) for section in sections])
    if not found:
        raise ConfigError(f"no machine has all of {sections}; run `python -m benchmarks llm` on one")
    return max(found, key=lambda results: max(result.moment for result in results))


def _fastest_beside(result: Result) -> str:
    """What came nearest to the engine in the same run; nothing where it ran alone."""
    others = {rate(row): row.name for row in result.rows if row.name != OURS}
    return f"{others[max(others)]} {number(max(others), 3)} tokens/s" if others else ""
