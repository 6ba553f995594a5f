"""The rotary embedding of a config.json, as transformers writes it before and since version 5."""

from collections.abc import Callable

from fullstride.errors import ConfigError
from fullstride.llm.config import LinearRope, Llama3Rope, RopeScaling, YarnRope, yarn_magnitude
from fullstride.llm.weights.settings import Settings, shortened


def read_rope(settings: Settings) -> tuple[float, RopeScaling | None]:
    """The base theta, and how frequencies are scaled.

    Raises:
        ConfigError: for a kind of scaling that is not supported, or numbers that cannot be.

    """
    new, old = settings.inner("rope_parameters"), settings.inner("rope_scaling")
    length = settings.size("max_position_embeddings")
    theta = new.decimal("rope_theta", old.decimal("rope_theta", settings.decimal("rope_theta", 10_000.0)))
    scaling = _scaling(new if new.raw else old, length)
    if new.raw and old.raw and (theta, scaling) != (old.decimal("rope_theta", theta), _scaling(old, length)):
        raise ConfigError(
            f"{settings.file}: rope_parameters={shortened(new.raw)} and rope_scaling={shortened(old.raw)}: expected one"
            " of them, or two that say the same: keep the one that is meant"
        )
    return theta, scaling


def _scaling(rope: Settings, length: int) -> RopeScaling | None:
    kind = str(rope.raw.get("rope_type") or rope.raw.get("type") or "default")
    if kind not in ROPES:
        raise ConfigError(f"{rope.file}: rope_type={kind}: expected one of {', '.join(ROPES)}")
    if rope.raw.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"{rope.file}: partial_rotary_factor={rope.raw['partial_rotary_factor']}: expected 1")
    return ROPES[kind](rope, length)


def _llama3(rope: Settings, _: int) -> Llama3Rope:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if rope.raw.get(name) is None]:
        raise ConfigError(f"{rope.file}: the llama3 rope lacks {missing[0]}")
    low, high = rope.decimal("low_freq_factor"), rope.decimal("high_freq_factor")
    if low >= high:
        raise ConfigError(f"{rope.file}: low_freq_factor={low}: expected less than high_freq_factor, which is {high}")
    return Llama3Rope(rope.decimal("factor"), low, high, rope.size("original_max_position_embeddings"))


def _yarn(rope: Settings, length: int) -> YarnRope:
    factor = rope.decimal("factor")
    return YarnRope(
        factor,
        rope.size("original_max_position_embeddings", length),
        fast=rope.decimal("beta_fast", 32.0),
        slow=rope.decimal("beta_slow", 1.0),
        magnitude=rope.decimal("attention_factor", _magnitude(rope, factor)),
        whole=bool(rope.raw.get("truncate", True)),
    )


def _magnitude(rope: Settings, factor: float) -> float:
    """YaRN's own, or DeepSeek's quotient of two of it."""
    keys = ("mscale", "mscale_all_dim")
    if all(rope.raw.get(key) for key in keys):
        above, below = (yarn_magnitude(factor, rope.decimal(key)) for key in keys)
        return above / below
    return yarn_magnitude(factor)


ROPES: dict[str, Callable[[Settings, int], RopeScaling | None]] = {
    "default": lambda rope, length: None,
    "linear": lambda rope, length: LinearRope(rope.decimal("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
}
