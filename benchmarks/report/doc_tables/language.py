"""The tables of the documentation about language models, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.harness.seeds import seeds_in_words
from benchmarks.report.doc_tables.over_seeds import seeds_of
from benchmarks.report.hostile import SPREAD, attacks, waits
from benchmarks.report.markdown import MarkdownTable, the_experiment, the_part, the_result
from benchmarks.report.reading import Folder
from benchmarks.report.tables import number
from fullstride.errors import ConfigError

LEARNED = {
    "steps": "{:,.0f}",
    "minutes of steps": "{:.1f}",
    "training loss": "{:.2f}",
    "held-out masked loss": "{:.2f}",
    "accuracy": "{:.3f}",
    "bits/byte": "{:.3f}",
}
FLOOR = "over the floor"


def bert(scale: str, folder: Folder) -> MarkdownTable:
    """What each model has learned at a scale, cpu or gpu."""
    source = the_experiment(folder, f"experiment-bert--{scale}")
    table = MarkdownTable(("model", *LEARNED))
    for row in the_part(source, "learned"):
        if lacking := LEARNED.keys() - row["metrics"].keys():
            model, what = row["labels"]["model"], ", ".join(sorted(lacking))
            raise ConfigError(f"{source.name}: {model} has no {what}; let its run come to an end, and collect again")
        cells = (text.format(row["metrics"][name]["mean"]) for name, text in LEARNED.items())
        table.add(row["labels"]["model"], *cells, of=source)
        table.note = f"One run each, {seeds_in_words(seeds_of(row['metrics'].values()))}."
    return table


def bert_steps(scale: str, folder: Folder) -> MarkdownTable:
    """What calling the step costs there, by the way it is called."""
    source = the_experiment(folder, f"experiment-bert--{scale}")
    rows = the_part(source, "overhead")
    # Files of before ceilings were measured beside the steps have none.
    floor = any(FLOOR in row["metrics"] for row in rows)
    names = ("model", "way", "ms a step", "each waited for", "x the bare executable")
    table = MarkdownTable((*names, "x the bound") if floor else names, text=2)
    for row in rows:
        metrics = row["metrics"]
        cells = [number(metrics[name]["mean"]) for name in ("step ms", "step ms, each waited for")]
        cells.append(f"{metrics['over the bare executable']['mean']:.3f}")
        if floor:
            cells.append(f"{metrics[FLOOR]['mean']:.2f}" if FLOOR in metrics else "")
        table.add(row["labels"]["model"], row["labels"]["way"], *cells, of=source)
    return table


def serve(folder: Folder) -> MarkdownTable:
    """What clients of the server get on a CPU."""
    result = the_result(folder, "llm-serve", model="smollm2", precision="float32", device="cpu")
    names = ("clients", "first token, ms", "p99", "a token after it, ms", "tokens/s", "the engine alone", "share")
    table = MarkdownTable(names)
    for row in result.rows:
        extra, first = row.extra, row.extra["first_token_ms"]
        speeds = (number(extra[key]) for key in ("tokens_per_second", "engine_tokens_per_second"))
        times = (number(first["median"]), number(first["p99"]), number(row.median))
        table.add(str(extra["batch"]), *times, *speeds, f"{100 * extra['share_of_the_engine']:.0f} %", of=result)
    return table


def hostile(folder: Folder) -> MarkdownTable:
    """How long others wait on a CPU while the server gets the worst requests."""
    result = the_result(folder, "llm-hostile", model="smollm2", precision="float32", device="cpu")
    of_health = tuple(f"/health {name}" for name in SPREAD)
    table = MarkdownTable(("meanwhile", "a token, median ms", *SPREAD[1:], *of_health, "attacks/s", "answers"))
    for row in result.rows:
        table.add(row.name, *waits(row), *attacks(row), of=result)
    return table


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "bert-cpu": partial(bert, "cpu"),
    "bert-cpu-steps": partial(bert_steps, "cpu"),
    "bert-gpu": partial(bert, "gpu"),
    "bert-gpu-steps": partial(bert_steps, "gpu"),
    "hostile": hostile,
    "serve": serve,
}
