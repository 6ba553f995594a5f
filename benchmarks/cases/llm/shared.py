"""What the engine's benches share: names, a whole workload, and how a result is shown."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases.llm.work import Work
from benchmarks.harness.results import CaseResult, write_result
from benchmarks.harness.table import console_of, result_table
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.outputs import Delta
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


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Delta]]:
    """Run prompts on an idle engine, all at once; what comes of each."""
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, own)
    found: list[list[Delta]] = [[] for _ in prompts]
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            found[int(delta.request_id)].append(delta)
    return found


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    """All tokens of an answer."""
    return [token for delta in deltas for token in delta.token_ids]


def complete(engine: Engine, work: Work, temperature: float) -> list[list[int]]:
    """Run the work on an idle engine; the tokens of each answer."""
    params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in work.outputs]
    return [*map(tokens_of, run_all(engine, work.prompts, params))]
