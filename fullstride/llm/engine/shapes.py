"""Fixed grid of shapes that an engine is compiled for, from its settings, the model and the device."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.pool import pool_blocks
from fullstride.llm.kernels.interface import FP8_POOL, Kernels


class BatchLimits(NamedTuple):
    """Default limits: tokens per step, sequences, steps per dispatch, tokens per tile."""

    budget: int
    rows: int
    steps: int
    tile: int


DEFAULTS = {
    "cpu": BatchLimits(budget=256, rows=8, steps=4, tile=32),
    "other": BatchLimits(budget=2048, rows=256, steps=8, tile=64),
}
# Between the sizes of a grid: rows of a decode step on a CPU and elsewhere, tiles, blocks of a table.
CPU_ROWS, ROWS, TILES, WIDTHS = 8, 2, 4, 4
# Bursts of decode steps that a sequence has blocks for before the first of them is read.
IN_FLIGHT = 3
# Tokens of the longest sequence that is looked for.
LONGEST = 1 << 31
# Tokens of the smallest mixed step.
LEAST_CHUNK = 64
# Tokens of the largest step that verifies drafts.
VERIFIED = 128
# Tokens of the smallest block table with a separate program.
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class CompiledShapes:
    """Shapes that an engine is compiled for.

    Attributes:
        rows: number of sequences at once.
        row_buckets: compiled numbers of rows of a decode step.
        tile: tokens of a tile of a prompt chunk.
        tile_buckets: compiled numbers of tiles of a mixed step.
        widths: compiled numbers of blocks of a block table.
        budget: tokens per step, at most.
        steps: decode steps per dispatch, at most.
        block: tokens of a KV cache block.
        blocks: number of KV cache blocks, without block 0, which is scratch.
        max_length: tokens of a sequence, at most.
        dtype: dtype of the weights.
        pool: dtype of the KV cache.
        windows: for each group of layers with block tables of its own the tokens that a token sees; None for all.
        drafts: tokens of a draft, at most; 0 without speculative decoding.

    """

    rows: int
    row_buckets: tuple[int, ...]
    tile: int
    tile_buckets: tuple[int, ...]
    widths: tuple[int, ...]
    budget: int
    steps: int
    block: int
    blocks: int
    max_length: int
    dtype: str
    pool: str
    windows: tuple[int | None, ...] = (None,)
    drafts: int = 0

    def held_blocks(self, window: int | None, tokens: int) -> int:
        """Return the blocks that a sequence of so many tokens has at once, at most, in a group of layers."""
        whole = -(-tokens // self.block)
        # Those that the first token of a step sees, and of the tokens of that step and of the bursts in flight.
        span = (window or 0) - 1 + self.budget + IN_FLIGHT * max(self.steps, self.drafts + 1)
        return whole if window is None else min(whole, -(-span // self.block) + 1)

    @property
    def holds(self) -> int:
        """Tokens of the longest sequence for which there are blocks; the newest token needs none yet."""
        counts = range(LONGEST // self.block + 1)
        fitting = bisect_right(counts, self.blocks, key=lambda n: self.needed(n * self.block)) - 1
        return fitting * self.block + 1

    @property
    def verify_buckets(self) -> tuple[int, ...]:
        """Compiled numbers of rows of a step that verifies drafts; those of larger batches would save nothing."""
        each = self.drafts + 1
        return tuple(rows for rows in self.row_buckets if self.drafts and rows * each <= max(VERIFIED, each))

    def needed(self, tokens: int) -> int:
        """Return the blocks that a sequence of so many tokens has at once, at most, in all groups."""
        return sum(self.held_blocks(window, tokens) for window in self.windows)


def dtype_for(config: EngineConfig, platform: str, own: str) -> str:
    """Return the dtype of the weights."""
    return config.dtype or ("float32" if platform == "cpu" else own)


def pool_for(config: EngineConfig, dtype: str) -> str:
    """Return the dtype of the KV cache, given that of the weights."""
    return dtype if config.kv_cache_dtype == "auto" else FP8_POOL


def check(config: EngineConfig, model: ModelConfig, platform: str, dtype: str) -> None:
    """Check the settings, except those that depend on the devices' memory.

    Args:
        config: settings.
        model: sizes.
        platform: JAX platform of the devices.
        dtype: dtype of the weights.

    Raises:
        ConfigError: if a step has no token for a prompt, `max_length` is more than the model's, or `kv_memory` holds no
            block.

    """
    _batch_limits(config, platform)
    _longest(config, model)
    if config.kv_memory:
        pool_blocks(config, model, pool_for(config, dtype), (), needed=0)


def _batch_limits(config: EngineConfig, platform: str) -> BatchLimits:
    default = DEFAULTS["cpu" if platform == "cpu" else "other"]
    rows = config.max_sequences or default.rows
    # If all rows but one decode, that one's prompt still needs a token.
    budget = config.max_tokens_per_step or max(default.budget, rows + default.tile)
    if budget <= rows:
        raise ConfigError(f"max_tokens_per_step={budget}: expected more than max_sequences, which is {rows}")
    steps = config.steps_per_dispatch or default.steps
    return BatchLimits(budget=budget, rows=rows, steps=steps, tile=min(default.tile, budget))


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_length and config.max_length > model.max_position:
        raise ConfigError(
            f"max_length={config.max_length}: expected at most {model.max_position}, the model's context length"
        )
    return config.max_length or model.max_position


def choose_shapes(config: EngineConfig, model: ModelConfig, kernels: Kernels, *devices: Any) -> CompiledShapes:
    """Choose the shapes that the settings leave open; call it once the weights are on the devices.

    Raises:
        ConfigError: as `check`; or if there is no room for a block, or on a CPU not for a sequence of the length that
            was asked for.

    """
    device = devices[0]
    limits = _batch_limits(config, device.platform)
    dtype = dtype_for(config, device.platform, model.dtype)
    pool = pool_for(config, dtype)
    longest = _longest(config, model)
    least_tiles = max(1, min(LEAST_CHUNK, limits.budget) // limits.tile)
    made = CompiledShapes(
        rows=limits.rows,
        row_buckets=_grid(1, limits.rows, CPU_ROWS if device.platform == "cpu" else ROWS),
        tile=limits.tile,
        tile_buckets=_grid(least_tiles, max(1, limits.budget // limits.tile), TILES),
        widths=(),
        budget=limits.budget,
        steps=limits.steps,
        block=config.block_size,
        blocks=0,
        max_length=longest,
        dtype=dtype,
        pool=pool,
        windows=model.cache_windows,
        drafts=0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens,
    )
    made = replace(made, blocks=pool_blocks(config, model, pool, devices, made.needed(longest)))
    longest = longest if config.max_length else min(longest, made.holds)
    widest, least = (-(-tokens // config.block_size) for tokens in (longest, LEAST_CONTEXT))
    return replace(made, max_length=longest, widths=(widest,) if kernels.dynamic else _grid(least, widest, WIDTHS))


def _grid(low: int, high: int, factor: int) -> tuple[int, ...]:
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return (*found, high)
