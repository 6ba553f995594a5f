"""The commands `python -m benchmarks llm` and `python -m benchmarks paged-attention`."""

from typing import Annotated, Any

import typer

from benchmarks.harness.result_paths import RESULTS
from fullstride.cli.options import Results
from fullstride.errors import ConfigError, one_of


def engine(
    model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="A name, file or folder; qwen3-0.6b or qwen3-8b: random weights."),
    ] = "smollm2",
    workload: Annotated[
        str,
        typer.Option(
            metavar="small|large|sweep|latency|parallel|replicas|serve|hostile",
            help="4 prompts of 100 tokens; nano-vllm's bench; decode steps by batch and context; start, first token; "
            "one model, or copies of it, on several devices; clients of the HTTP server; the same under attack.",
        ),
    ] = "small",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Timed, after a first one, of small and large; 10 unless given.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Of the large workload; 256 unless given.")] = None,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Of small also transformers' generate; yes unless told."),
    ] = None,
    baseline_attention: Annotated[
        str | None,
        typer.Option(
            metavar="sdpa|eager|flash_attention_2|flash_attention_3",
            help="Of transformers; PyTorch's sdpa unless given. The last two need their packages, a GPU and bfloat16.",
        ),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="That of an environment with vLLM: runs it, too; of small and large."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16", help="Of the weights; float32 on a CPU unless given.")
    ] = None,
    kernels: Annotated[
        str,
        typer.Option(
            metavar="auto|token|chained|paged|plain", help="Of the engine; auto takes the fastest that can run."
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8", help="Of keys and values; auto is that of the weights.")
    ] = "auto",
    out: Results = RESULTS,
) -> None:
    """The language model engine beside transformers, vLLM and the floor of what must be read."""
    from benchmarks.cases.llm.case import run

    run(
        source=model,
        workload=workload,
        runs=runs,
        sequences=sequences,
        baseline=baseline,
        baseline_attention=baseline_attention,
        vllm=vllm,
        dtype=dtype,
        out=out,
        kernels=kernels,
        kv_cache_dtype=kv_cache_dtype,
    )


def paged_attention(
    heads: Annotated[int, typer.Option(min=1, help="Of queries.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Of keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(min=2, help="Of each head.")] = 128,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block of the pool.")] = 64,
    contexts: Annotated[tuple[int, int], typer.Option(help="Shortest and longest, in tokens.")] = (500, 2048),
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be given several times.")] = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Of the pool.")] = "bfloat16",
    kernels: Annotated[str, typer.Option(metavar="auto|paged|plain", help="Whose attention.")] = "auto",
    beside: Annotated[bool, typer.Option("--beside/--no-beside", help="Also a gather, and JAX's own kernel.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of contexts and numbers.")] = 0,
    out: Results = RESULTS,
) -> None:
    """Attention of decode steps through block tables, in shares of the copy rate."""
    from benchmarks.cases.llm.attention import BATCHES, run
    from fullstride.llm.kernels import Shape

    one_of("--dtype", dtype, ("bfloat16", "float32"))
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} --kv-heads {kv_heads}: expected a multiple of the key heads")
    if head_dim % 2:
        raise ConfigError(f"--head-dim {head_dim}: expected an even number, as rotary embeddings turn pairs")
    if not 1 <= contexts[0] <= contexts[1]:
        raise ConfigError(f"--contexts {contexts[0]} {contexts[1]}: expected two lengths, the shorter one first")
    shape = Shape(heads, kv_heads, head_dim, block, head_dim**-0.5, 1e-6)
    chosen: dict[str, Any] = {"dtype": dtype, "kernels": kernels, "beside": beside, "seed": seed}
    run(shape=shape, batches=batch or [*BATCHES], contexts=contexts, **chosen, out=out)
