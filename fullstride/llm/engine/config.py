"""Settings of an engine: its size and the memory that it may use."""

from dataclasses import dataclass
from numbers import Integral

from fullstride.errors import ConfigError, one_of
from fullstride.llm.config import DTYPES
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.vllm_names import DIFFERENT, ENGINE
from fullstride.renamed import accepts

# Dtypes of the KV cache; `auto` is the model's dtype, and vLLM's names after `fp8` are the same as it.
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_per_token_head")
# Packings of the weights; see `fullstride.llm.models.packing`.
QUANTIZE = ("auto", "none", "stored", "fp8", "int8", "int4")


@accepts(ENGINE, different=DIFFERENT)
@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; None lets it choose by the model and the device.

    vLLM's names are accepted for settings that mean the same: `max_model_len` (`max_length`), `max_num_seqs`
    (`max_sequences`), `max_num_batched_tokens` (`max_tokens_per_step`), `enable_prefix_caching` (`prefix_cache`) and
    `num_gpu_blocks_override` (`kv_blocks`).

    Attributes:
        max_tokens_per_step: tokens of prompt chunks and decode rows together; a longer prompt takes several steps.
        max_sequences: number of sequences that run at once; others wait.
        max_length: tokens of prompt and output together; by default as many as model and KV cache allow.
        block_size: tokens of a KV cache block.
        kv_blocks: number of KV cache blocks of all layers; a block of models with windows in some layers is several,
            one for each group of layers.
        kv_memory: bytes of the KV cache, if `kv_blocks` is not given.
        kv_share: share of the memory that is free once the weights are on the devices, if neither is given. The default
            is 0.8 on an accelerator. On a CPU it is the memory of one sequence of `max_length`, at least 512 MiB and,
            unless `max_length` is given, at most a quarter of the free memory.
        steps_per_dispatch: decode steps that the device runs per dispatch.
        dtype: dtype of the weights, and of the KV cache unless `kv_cache_dtype` differs; by default float32 on a CPU,
            because XLA's bfloat16 products are slow there, and the model's own elsewhere.
        kv_cache_dtype: `auto` stores keys and values in `dtype`; `fp8` in e4m3, a byte each, with a scale for each
            token and key head, so that a KV cache of the same bytes holds nearly twice as many tokens as one in
            bfloat16. Scales of a checkpoint are not needed, and not read.
        quantize: packing of the matrices: `none` has them in `dtype`; `stored` as the model's files pack them; `fp8`,
            `int8` and `int4` are made when the model is loaded. `auto` is `none`, the fastest with most kernel sets, or
            `stored` if the weights would otherwise take more than 0.7 of the free memory.
        kernels: `auto`, or the name of a kernel set of `fullstride.llm.kernels`.
        prefix_cache: whether prompts with a common prefix share blocks, which stay cached while there is room.
        compile_cache: whether compiled programs are cached on disk for the next start.
        max_loras: number of LoRA adapters that may run in one batch; 0 for those that an engine starts with.
        max_cpu_loras: number of adapters that are kept in host memory, and copied to the device when a request needs
            them, in place of the ones that were used longest ago; at least `max_loras`, and those that it starts with.
        max_lora_rank: largest rank of an adapter; those of smaller ranks are padded, so that any can be loaded later
            without a compilation.
        tensor_parallel_size: number of devices that share the model; each has its heads and its part of the MLP, the
            vocabulary and the KV cache.
        speculative_config: how tokens are drafted, to be verified several in one step; a dict with vLLM's names is
            taken, too. None decodes a token per step.

    """

    max_tokens_per_step: int | None = None
    max_sequences: int | None = None
    max_length: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    kv_memory: int | None = None
    kv_share: float | None = None
    steps_per_dispatch: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    quantize: str = "auto"
    kernels: str = "auto"
    prefix_cache: bool = True
    compile_cache: bool = True
    tensor_parallel_size: int = 1
    max_loras: int = 0
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self):
        """Validate the settings that depend on no model.

        Raises:
            ConfigError: naming the field.

        """
        counts = ("max_tokens_per_step", "max_sequences", "kv_blocks", "kv_memory", "steps_per_dispatch", "block_size")
        for name in (*counts, "tensor_parallel_size", "max_length", "max_loras", "max_cpu_loras", "max_lora_rank"):
            if (value := getattr(self, name)) is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: expected an integer")
            if value < (name != "max_loras") and name != "max_length":
                raise ConfigError(f"{name}={value}: expected {int(name != 'max_loras')} or more")
        if self.dtype is not None:
            # JAX would compute with a float64 of this as float32.
            one_of("dtype", self.dtype, DTYPES)
        one_of("quantize", self.quantize, QUANTIZE)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length={self.max_length}: expected 2 or more (one prompt token and one output token)"
            )
        if self.kv_share is not None and not 0 < self.kv_share <= 1:
            raise ConfigError(
                f"kv_share={self.kv_share}: expected a fraction of the free memory, above 0 and at most 1"
            )
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        given = [name for name in ("kv_blocks", "kv_memory", "kv_share") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other: give one")
