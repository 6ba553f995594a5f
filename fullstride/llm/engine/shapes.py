"""The fixed grid of shapes that an engine is compiled for, from its settings, the model and the device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.pool import pool_blocks
from fullstride.llm.kernels import FP8_POOL, Kernels


class BatchLimits(NamedTuple):
    """Attributes: tokens of a step, sequences, steps a dispatch, tokens of a tile."""

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
# Tokens of the smallest mixed step.
LEAST_CHUNK = 64
# Tokens of the smallest block table that has a program of its own.
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class CompiledShapes:
    """Shapes.

    Attributes:
        rows: sequences at once.
        row_buckets: rows of a decode step.
        tile: tokens of a tile of a prompt's chunk.
        tile_buckets: tiles of a mixed step.
        widths: blocks of a table.
        budget: tokens of a step.
        steps: most decode steps of a dispatch.
        block: tokens of a block.
        blocks: of the pool, but for block 0, which is nobody's.
        max_length: of a sequence.
        dtype: of weights.
        pool: dtype of the pool's array.

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


def dtype_for(config: EngineConfig, platform: str, own: str) -> str:
    """The dtype of weights."""
    return config.dtype or ("float32" if platform == "cpu" else own)


def pool_for(config: EngineConfig, dtype: str) -> str:
    """The dtype of the pool's array, given that of the weights."""
    return FP8_POOL if config.kv_cache_dtype == "fp8" else dtype


def check(config: EngineConfig, model: ModelConfig, platform: str, dtype: str) -> None:
    """See that settings can be, as far as the devices' memory has no say in it.

    Args:
        config: settings.
        model: sizes.
        platform: of the devices.
        dtype: of weights.

    Raises:
        ConfigError: if a step has no token for a prompt, `max_length` is more than the model's, or `kv_memory` holds no
            block.

    """
    _batch_limits(config, platform)
    longest = _longest(config, model)
    if config.kv_memory:
        pool_blocks(config, model, pool_for(config, dtype), (), longest)


def _batch_limits(config: EngineConfig, platform: str) -> BatchLimits:
    default = DEFAULTS["cpu" if platform == "cpu" else "other"]
    rows = config.max_sequences or default.rows
    # Where all rows but one decode, that one's prompt needs a token, too.
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
    """Choose what the settings leave open; the weights are on the devices by now.

    Raises:
        ConfigError: as `check`; or if there is no room for a block, or on a CPU not for a sequence of the length that
            was asked for.

    """
    device = devices[0]
    limits = _batch_limits(config, device.platform)
    dtype = dtype_for(config, device.platform, model.dtype)
    pool = pool_for(config, dtype)
    longest = _longest(config, model)
    blocks = pool_blocks(config, model, pool, devices, longest)
    # The newest token of a sequence needs no slot.
    holds = blocks * config.block_size + 1
    longest = longest if config.max_length else min(longest, holds)
    widest = -(-longest // config.block_size)
    least_tiles = max(1, min(LEAST_CHUNK, limits.budget) // limits.tile)
    least_width = -(-LEAST_CONTEXT // config.block_size)
    return CompiledShapes(
        rows=limits.rows,
        row_buckets=_grid(1, limits.rows, CPU_ROWS if device.platform == "cpu" else ROWS),
        tile=limits.tile,
        tile_buckets=_grid(least_tiles, max(1, limits.budget // limits.tile), TILES),
        widths=(widest,) if kernels.dynamic else _grid(least_width, widest, WIDTHS),
        budget=limits.budget,
        steps=limits.steps,
        block=config.block_size,
        blocks=blocks,
        max_length=longest,
        dtype=dtype,
        pool=pool,
    )


def _grid(low: int, high: int, factor: int) -> tuple[int, ...]:
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return (*found, high)
