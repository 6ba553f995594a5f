"""Options of `python -m benchmarks llm` and `paged-attention`; imports no framework."""

from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, among
from fullstride.errors import ConfigError, one_of

# What can run with keys and values of another dtype than the model's, and what cannot.
WITH_KV_DTYPE = ("small", "large", "sweep")
WORKLOADS = (*WITH_KV_DTYPE, "latency", "parallel", "replicas", "serve", "hostile")
# Which workloads have an option.
OF = {
    "runs": ("small", "large"),
    "sequences": ("large",),
    "baseline": ("small",),
    "baseline_attention": ("small",),
    "vllm": ("small", "large"),
}
# Of transformers, which the engine stands beside: what it takes by itself, and what else it is asked for by name.
ATTENTION, ATTENTIONS = "sdpa", ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
RUNS, SEQUENCES = 10, 256
# What `paged-attention` takes unless told; other rows and blocks make a file of their own.
BATCHES, BLOCK = (1, 4, 8, 16, 32, 64), 64


@dataclass(frozen=True)
class LlmOptions(CaseOptions):
    """The language model engine beside transformers, vLLM and the floor of what must be read."""

    model: Annotated[str, among("NAME|PATH", "A name, file or folder; qwen3-0.6b or qwen3-8b: random weights.")] = (
        "smollm2"
    )
    workload: Annotated[
        str,
        among(
            "|".join(WORKLOADS),
            "4 prompts of 100 tokens; nano-vllm's bench; decode steps by batch and context; start, first token; "
            "one model, or copies of it, on several devices; clients of the HTTP server; the same under attack.",
        ),
        WORKLOADS,
    ] = "small"
    runs: Annotated[
        int | None, typer.Option(min=1, help="Timed, after a first one, of small and large; 10 unless given.")
    ] = None
    sequences: Annotated[int | None, typer.Option(min=1, help="Of the large workload; 256 unless given.")] = None
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Of small also transformers' generate; yes unless told."),
    ] = None
    baseline_attention: Annotated[
        str | None,
        among(
            "|".join(ATTENTIONS),
            "Of transformers; PyTorch's sdpa unless given. The last two need their packages, a GPU and bfloat16.",
        ),
    ] = None
    vllm: Annotated[
        str | None, among("PYTHON", "That of an environment with vLLM: runs it, too; of small and large.")
    ] = None
    dtype: Annotated[str | None, among("float32|bfloat16", "Of the weights; float32 on a CPU unless given.")] = None
    kernels: Annotated[
        str, among("auto|token|chained|paged|plain", "Of the engine; auto takes the fastest that can run.")
    ] = "auto"
    kv_cache_dtype: Annotated[str, among("auto|fp8", "Of keys and values; auto is that of the weights.")] = "auto"

    def __post_init__(self) -> None:
        """Check the names, and that the workload has what is given."""
        super().__post_init__()
        if self.kv_cache_dtype != "auto" and self.workload not in WITH_KV_DTYPE:
            given = f"kv_cache_dtype={self.kv_cache_dtype} with --workload {self.workload}"
            raise ConfigError(f"{given}: expected one of {', '.join(WITH_KV_DTYPE)}")
        for name, workloads in OF.items():
            if getattr(self, name) is not None and self.workload not in workloads:
                own = f"{' and '.join(workloads)} {'has' if len(workloads) == 1 else 'have'}"
                raise ConfigError(f"--{name.replace('_', '-')} with --workload {self.workload}: only {own} it")
        one_of("--baseline-attention", self.attention, ATTENTIONS)
        if self.baseline is False and self.baseline_attention:
            raise ConfigError(
                f"--baseline-attention {self.attention} with --no-baseline: nothing would run it; leave one out"
            )

    @property
    def attention(self) -> str:
        """Attention of transformers, by its name there."""
        return self.baseline_attention or ATTENTION


@dataclass(frozen=True)
class AttentionOptions(CaseOptions):
    """Attention of decode steps through block tables, in shares of the copy rate."""

    heads: Annotated[int, typer.Option(min=1, help="Of queries.")] = 32
    kv_heads: Annotated[int, typer.Option(min=1, help="Of keys and values.")] = 8
    head_dim: Annotated[int, typer.Option(min=2, help="Of each head.")] = 128
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block of the pool.")] = BLOCK
    contexts: Annotated[tuple[int, int], typer.Option(help="Shortest and longest, in tokens.")] = (500, 2048)
    batch: Annotated[tuple[int, ...], typer.Option(min=1, help="Rows; may be given several times.")] = BATCHES
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Of the pool."), ("bfloat16", "float32")] = (
        "bfloat16"
    )
    kernels: Annotated[str, typer.Option(metavar="auto|paged|plain", help="Whose attention.")] = "auto"
    beside: Annotated[bool, typer.Option("--beside/--no-beside", help="Also a gather, and JAX's own kernel.")] = True
    seed: Annotated[int, typer.Option(min=0, help="Of contexts and numbers.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads {self.heads} --kv-heads {self.kv_heads}: expected a multiple of the key heads")
        if self.head_dim % 2:
            raise ConfigError(f"--head-dim {self.head_dim}: expected an even number, as rotary embeddings turn pairs")
        low, high = self.contexts
        if not 1 <= low <= high:
            raise ConfigError(f"--contexts {low} {high}: expected two lengths, the shorter one first")
