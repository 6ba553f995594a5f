"""Options of `python -m benchmarks llm`, `llm-products`, `llm-token` and `paged-attention`; imports no framework."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.harness.options import CaseOptions, Seconds, among
from fullstride.errors import ConfigError, one_of

# Workloads that support a KV cache with another data type than the model's, and those that do not.
WITH_KV_DTYPE = ("small", "large", "sweep")
WORKLOADS = (*WITH_KV_DTYPE, "latency", "speculation", "parallel", "replicas", "serve", "hostile", "soak")
# Workloads that support packed weights: those that compare with no engine of unpacked ones.
WITH_PACKED = ("large", "sweep", "serve", "soak")
# Workloads that have an option.
OF = {
    "runs": ("small", "large"),
    "sequences": ("large",),
    "baseline": ("small",),
    "baseline_attention": ("small",),
    "vllm": ("small", "large"),
    "beside": ("small", "large"),
    "adapters": ("serve", "soak"),
    "minutes": ("soak",),
}
# Attention of transformers: the default, and all names that may be requested.
ATTENTION, ATTENTIONS = "sdpa", ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
# Ways of transformers, with the names of their rows.
ONE_BY_ONE, BATCHED, STATIC = "one-by-one", "batched", "static"
WAYS = {
    ONE_BY_ONE: "transformers, one by one",
    BATCHED: "transformers, batched",
    STATIC: "transformers, batched and compiled",
}
# Peers of `--beside` that are ways of transformers: its attention and the ways, which only small has.
FLASH = "flash_attention_2"
TRANSFORMERS = {
    "transformers": (ATTENTION, {way: WAYS[way] for way in (ONE_BY_ONE, BATCHED)}),
    "transformers-static": (ATTENTION, {STATIC: WAYS[STATIC]}),
    "transformers-flash": (FLASH, {BATCHED: f"{WAYS[BATCHED]}, {FLASH}"}),
}
# Peers of `--beside` that run by an interpreter of their own, and the one that is a checkout.
BY_PYTHON, CHECKOUT = ("vllm", "vllm-tuned", "sglang"), "nano-vllm"
RUNS, SEQUENCES = 10, 256
# Defaults of `paged-attention`; other rows and blocks have their own result file.
BATCHES, BLOCK = (1, 4, 8, 16, 32, 64), 64
TARGETS = ("hopper", "a100", "l4", "rtx50")
# Of `llm-products`, likewise.
ROWS, MODELS = (1, 4, 16, 64), ("qwen3-8b", "qwen3-0.6b")
# Of `llm-token`, likewise.
STEP_ROWS, STEP_CONTEXTS = (1, 4, 8, 16), (100, 400, 2000)


class PeerOption(NamedTuple):
    """Peer that `--beside` names.

    Attributes:
        name: of `TRANSFORMERS`, `BY_PYTHON` or `CHECKOUT`.
        python: interpreter that has the engine; None for this one.
        checkout: folder of the engine's source.

    """

    name: str
    python: str | None = None
    checkout: str | None = None


def peers_of(text: str) -> tuple[PeerOption, ...]:
    """Return the peers of `NAME[=PATH],...`; nano-vllm runs by the first interpreter that is given, if any is.

    Raises:
        ConfigError: for a name that is not known, or a path that is missing or not wanted.

    """
    given = [part.partition("=")[::2] for part in text.split(",")]
    python, found = next((path for name, path in given if name in BY_PYTHON and path), None), []
    for name, path in given:
        one_of("--beside", name, (*TRANSFORMERS, *BY_PYTHON, CHECKOUT))
        if name == CHECKOUT and not (Path(path) / "nanovllm").is_dir():
            raise ConfigError(f"--beside {name}={path}: expected the path of a checkout, with the folder nanovllm")
        if name in TRANSFORMERS and path:
            raise ConfigError(f"--beside {name}={path}: expected no path, because it runs by this interpreter")
        checkout = str(Path(path).resolve()) if name == CHECKOUT else None
        found.append(PeerOption(name, python if checkout else path or None, checkout))
    return tuple(found)


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
    beside: Annotated[
        str | None,
        among(
            "NAME[=PATH],...",
            "Peers to time instead of --baseline and --vllm: transformers, transformers-static, transformers-flash; "
            "vllm, vllm-tuned or sglang, with the Python that has it; nano-vllm with a checkout. What does not run is "
            "named.",
        ),
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

    quantize: Annotated[
        str,
        among(
            "auto|none|stored|fp8|int8|int4",
            "Packing of the weights; stored is as the files have them, or Q4_K with Q6_K for random ones.",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        """Check the names, and that the workload has the given options."""
        super().__post_init__()
        if self.quantize not in ("auto", "none") and self.workload not in WITH_PACKED:
            given = f"quantize={self.quantize} with --workload {self.workload}"
            raise ConfigError(f"{given}: expected one of {', '.join(WITH_PACKED)}")
        if self.kv_cache_dtype != "auto" and self.workload not in WITH_KV_DTYPE:
            given = f"kv_cache_dtype={self.kv_cache_dtype} with --workload {self.workload}"
            raise ConfigError(f"{given}: expected one of {', '.join(WITH_KV_DTYPE)}")
        for name, workloads in OF.items():
            if getattr(self, name) is not None and self.workload not in workloads:
                own = f"{' and '.join(workloads)} {'has' if len(workloads) == 1 else 'have'}"
                raise ConfigError(f"--{name.replace('_', '-')} with --workload {self.workload}: only {own} this option")
        one_of("--baseline-attention", self.attention, ATTENTIONS)
        if self.beside is not None and (self.vllm or self.baseline is not None or self.baseline_attention):
            raise ConfigError("--beside with --vllm, --baseline or --baseline-attention: expected one of the two")
        if self.workload != "small" and (own := [each.name for each in self.peers if each.name in TRANSFORMERS]):
            raise ConfigError(f"--beside {own[0]} with --workload {self.workload}: only small has it")
        if self.baseline is False and self.baseline_attention:
            raise ConfigError(
                f"--baseline-attention {self.attention} with --no-baseline: it would never run; remove one of the two"
            )

    @property
    def peers(self) -> tuple[PeerOption, ...]:
        """Peers of `--beside`."""
        return peers_of(self.beside) if self.beside else ()

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
        str,
        typer.Option(metavar="float32|bfloat16|fp8", help="Data type of the KV cache; fp8 beside bfloat16."),
        ("bfloat16", "float32", "fp8"),
    ] = "bfloat16"
    kernels: Annotated[str, typer.Option(metavar="auto|paged|plain", help="Kernels that compute the attention.")] = (
        "auto"
    )
    target: Annotated[
        tuple[str, ...],
        among("|".join(TARGETS), "GPU that the kernel is also compiled for, on Hopper; may be repeated [default: l4]."),
        TARGETS,
    ] = ()
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


@dataclass(frozen=True)
class ProductsOptions(CaseOptions):
    """Products of few rows with a model's matrices, in bf16 and packed, as a share of the copy rate."""

    model: Annotated[str, among("|".join(MODELS), "Model whose shapes the matrices have."), MODELS] = MODELS[0]
    # More than 256 are no work of the packed kernel.
    rows: Annotated[tuple[int, ...], typer.Option(min=1, max=256, help="Number of rows; may be repeated.")] = ROWS
    formats: Annotated[
        tuple[str, ...], among("FORMAT", "Format of packed weights; may be repeated. All if not given.")
    ] = ()
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and inputs.")] = 0
    seconds: Seconds = 500.0


@dataclass(frozen=True)
class TokenOptions(CaseOptions):
    """Decode steps of few rows in one launch each, without an engine."""

    model: Annotated[str, among("|".join(MODELS), "Model whose shapes the weights have."), MODELS] = MODELS[1]
    rows: Annotated[tuple[int, ...], typer.Option(min=1, max=16, help="Number of rows; may be repeated.")] = STEP_ROWS
    contexts: Annotated[
        tuple[int, ...], typer.Option(min=1, help="Number of tokens of each context; may be repeated.")
    ] = STEP_CONTEXTS
    seed: Annotated[int, typer.Option(min=0, help="Seed of contexts.")] = 0
    seconds: Seconds = 500.0
