"""Options of `python -m benchmarks llm` and `paged-attention`; imports no framework."""

from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks.harness.options import CaseOptions, among
from fullstride.errors import ConfigError, one_of

# Workloads that support a KV cache with another data type than the model's, and those that do not.
WITH_KV_DTYPE = ("small", "large", "sweep")
WORKLOADS = (*WITH_KV_DTYPE, "latency", "speculation", "parallel", "replicas", "serve", "hostile", "soak")
# Workloads that have an option.
OF = {
    "runs": ("small", "large"),
    "sequences": ("large",),
    "baseline": ("small",),
    "baseline_attention": ("small",),
    "vllm": ("small", "large"),
    "adapters": ("serve", "soak"),
    "minutes": ("soak",),
}
# Attention of transformers: the default, and all names that may be requested.
ATTENTION, ATTENTIONS = "sdpa", ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
RUNS, SEQUENCES = 10, 256
# Defaults of `paged-attention`; other rows and blocks have their own result file.
BATCHES, BLOCK = (1, 4, 8, 16, 32, 64), 64


@dataclass(frozen=True)
class LlmOptions(CaseOptions):
    """Compare the language model engine with transformers, vLLM and the roofline bound."""

    model: Annotated[
        str, among("NAME|PATH", "Name, file or folder of the model; qwen3-0.6b and qwen3-8b have random weights.")
    ] = "smollm2"
    workload: Annotated[
        str,
        among(
            "|".join(WORKLOADS),
            "Workload: 4 prompts of 100 tokens; nano-vllm's benchmark; decode steps by batch and context; start-up and "
            "first token; drafts from prompts; one model, or copies of it, on several devices; HTTP clients; "
            "HTTP clients under attack; HTTP clients for hours.",
        ),
        WORKLOADS,
    ] = "small"
    runs: Annotated[
        int | None, typer.Option(min=1, help="Number of timed runs after a warm-up, for small and large [default: 10].")
    ] = None
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Number of sequences of the large workload [default: 256].")
    ] = None
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline", help="Also time transformers' generate on the small workload [default: yes]."
        ),
    ] = None
    baseline_attention: Annotated[
        str | None,
        among(
            "|".join(ATTENTIONS),
            "Attention of transformers [default: sdpa]. The last two need their packages, a GPU and bfloat16.",
        ),
    ] = None
    vllm: Annotated[
        str | None, among("PYTHON", "Python of an environment with vLLM: also time vLLM, on small and large.")
    ] = None
    adapters: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of random LoRA adapters of rank 8 that clients of serve and soak mix with the model."
        ),
    ] = None
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Minutes of soak [default: 10].")] = None
    dtype: Annotated[
        str | None, among("float32|bfloat16", "Data type of the weights; float32 on a CPU if not given.")
    ] = None
    kernels: Annotated[
        str, among("auto|token|chained|paged|plain", "Kernels of the engine; auto selects the fastest that can run.")
    ] = "auto"
    kv_cache_dtype: Annotated[str, among("auto|fp8", "Data type of the KV cache; auto is that of the weights.")] = (
        "auto"
    )

    def __post_init__(self) -> None:
        """Check the names, and that the workload has the given options."""
        super().__post_init__()
        if self.kv_cache_dtype != "auto" and self.workload not in WITH_KV_DTYPE:
            given = f"kv_cache_dtype={self.kv_cache_dtype} with --workload {self.workload}"
            raise ConfigError(f"{given}: expected one of {', '.join(WITH_KV_DTYPE)}")
        for name, workloads in OF.items():
            if getattr(self, name) is not None and self.workload not in workloads:
                own = f"{' and '.join(workloads)} {'has' if len(workloads) == 1 else 'have'}"
                raise ConfigError(f"--{name.replace('_', '-')} with --workload {self.workload}: only {own} this option")
        one_of("--baseline-attention", self.attention, ATTENTIONS)
        if self.baseline is False and self.baseline_attention:
            raise ConfigError(
                f"--baseline-attention {self.attention} with --no-baseline: it would never run; remove one of the two"
            )

    @property
    def attention(self) -> str:
        """Name of the attention in transformers."""
        return self.baseline_attention or ATTENTION


@dataclass(frozen=True)
class AttentionOptions(CaseOptions):
    """Attention of decode steps through block tables, as a share of the copy rate."""

    heads: Annotated[int, typer.Option(min=1, help="Number of query heads.")] = 32
    kv_heads: Annotated[int, typer.Option(min=1, help="Number of key and value heads.")] = 8
    head_dim: Annotated[int, typer.Option(min=2, help="Elements per head.")] = 128
    block: Annotated[int, typer.Option(min=1, help="Tokens per block of the KV cache.")] = BLOCK
    contexts: Annotated[tuple[int, int], typer.Option(help="Shortest and longest context, in tokens.")] = (500, 2048)
    batch: Annotated[tuple[int, ...], typer.Option(min=1, help="Number of rows; may be repeated.")] = BATCHES
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16", help="Data type of the KV cache."), ("bfloat16", "float32")
    ] = "bfloat16"
    kernels: Annotated[str, typer.Option(metavar="auto|paged|plain", help="Kernels that compute the attention.")] = (
        "auto"
    )
    beside: Annotated[bool, typer.Option("--beside/--no-beside", help="Also time a gather, and JAX's own kernel.")] = (
        True
    )
    seed: Annotated[int, typer.Option(min=0, help="Seed of context lengths and values.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--heads {self.heads} --kv-heads {self.kv_heads}: expected --heads to be a multiple of --kv-heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"--head-dim {self.head_dim}: expected an even number, because rotary embeddings rotate pairs"
            )
        low, high = self.contexts
        if not 1 <= low <= high:
            raise ConfigError(f"--contexts {low} {high}: expected two lengths, the shorter one first")
