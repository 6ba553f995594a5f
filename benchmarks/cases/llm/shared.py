"""What the engine's benches share: names, a whole workload, and how a result is shown."""

from pathlib import Path

from benchmarks.cases.llm.work import Work
from benchmarks.harness.results import CaseResult, write_result
from benchmarks.harness.table import console_of, result_table
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.sampling_params import SamplingParams
from fullstride.measure.roofline import marked

WIDTH = 120  # columns that the table needs


def shown(result: CaseResult, out: Path) -> Path:
    """Print a result, its tokens a second beside their bound or their engine's, and write it."""
    console = console_of(WIDTH)
    console.print(result_table(result))
    for row in result.rows:
        if "tokens_per_second" in row.extra:
            beside = marked(f"{1 / row.over_floor:.0%} of the roofline bound", row.over_floor)
            if "share_of_the_engine" in row.extra:
                beside = f"{row.extra['share_of_the_engine']:.0%} of the engine alone"
            console.print(f"{row.name}: {row.extra['tokens_per_second']:.1f} tokens/s, {beside}", highlight=False)
    return write_result(result, out)


def name_of(source: str) -> str:
    """Of a model, from its file or folder."""
    path = Path(source)
    return path.stem if path.is_file() else path.name


def kept_as(settings: EngineConfig) -> dict[str, str]:
    """What a result says of its pool, if that is not the weights' dtype."""
    return {} if settings.kv_cache_dtype == "auto" else {"kv_cache_dtype": settings.kv_cache_dtype}


def complete(engine: Engine, work: Work, temperature: float) -> list[list[int]]:
    """Run the work on an idle engine; the tokens of each answer."""
    for i, (prompt, count) in enumerate(zip(work.prompts, work.outputs, strict=True)):
        engine.add(str(i), prompt, SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True))
    tokens: list[list[int]] = [[] for _ in work.prompts]
    while engine.busy:
        for delta in engine.step():
            tokens[int(delta.request_id)] += delta.token_ids
            if delta.error:
                raise RuntimeError(delta.error)
    return tokens
