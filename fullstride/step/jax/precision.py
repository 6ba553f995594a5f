"""Number formats of a step: what the model computes in, and how its loss is scaled; parameters keep their own."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fullstride.errors import ConfigError, one_of


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (arXiv:1710.03740, section 3.2): doubled while gradients are finite, halved when not.

    Attributes:
        initial: the first scale.
        period: finite steps in a row before it is doubled.
        smallest: it is not halved below this.

    """

    initial: float = 2.0**15
    period: int = 2000
    smallest: float = 1.0

    def __post_init__(self) -> None:
        if not (math.inf > self.initial >= self.smallest > 0 and self.period >= 1):
            raise ConfigError(f"{self}: expected a finite initial >= smallest > 0 and period >= 1")


class ScaleState(NamedTuple):
    """The current scale and the finite steps since it last changed."""

    scale: Float[Array, ""]
    finite: Int[Array, ""]


@dataclass(frozen=True)
class Precision:
    """Numeric formats of a step.

    Attributes:
        compute: the dtype that floating parameters and batches are cast to for the loss; None leaves them.
        loss_scale: factor of the loss before it is differentiated: a number, a `LossScale`, or None.
        cast_batch: whether floating leaves of the batch are cast too.

    """

    compute: str | None = None
    loss_scale: float | LossScale | None = None
    cast_batch: bool = True

    def __post_init__(self) -> None:
        if self.compute is not None:
            one_of("precision.compute", self.compute, ("bfloat16", "float16", "float32", "float64"))
        if isinstance(self.loss_scale, float | int) and not self.loss_scale > 0:
            raise ConfigError(f"precision.loss_scale={self.loss_scale}: expected a number above 0")

    def cast(self, tree: Any) -> Any:
        """Return the tree with its real floating arrays cast to `compute`.

        Raises:
            ConfigError: for fp64 if JAX has it switched off and would use fp32 instead.

        """
        if self.compute == "float64" and jax.dtypes.canonicalize_dtype("float64") != jnp.float64:
            raise ConfigError(
                "precision.compute=float64: JAX has fp64 switched off; run jax.config.update('jax_enable_x64', True)"
            )
        if self.compute is None:
            return tree
        return jax.tree.map(lambda x: x.astype(self.compute) if is_floating(x) else x, tree)

    @property
    def dynamic(self) -> LossScale | None:
        """Dynamic scaling, if requested."""
        return self.loss_scale if isinstance(self.loss_scale, LossScale) else None

    def factor(self, state: ScaleState | None) -> Float[Array, ""] | float:
        """Return the factor that this step multiplies the loss by."""
        if state is not None:
            return state.scale
        return 1.0 if self.loss_scale is None or isinstance(self.loss_scale, LossScale) else float(self.loss_scale)

    def next_scale(self, state: ScaleState, finite: Bool[Array, ""]) -> ScaleState:
        """Return the scale of the next step, given whether this one's gradients were finite."""
        dynamic = self.dynamic or LossScale()
        count = jnp.where(finite, state.finite + 1, 0)
        # Of what underflows in bf16 any scale is small enough, until it is infinite, half of which is as much.
        doubled = jnp.where(jnp.isfinite(state.scale * 2), state.scale * 2, state.scale)
        grown = jnp.where(count >= dynamic.period, doubled, state.scale)
        halved = jnp.maximum(state.scale / 2, jnp.asarray(dynamic.smallest, state.scale.dtype))
        return ScaleState(jnp.where(finite, grown, halved), jnp.where(count >= dynamic.period, 0, count))


NAMED = {
    "fp32": Precision(),
    "bf16": Precision("bfloat16"),
    "fp16": Precision("float16", LossScale()),
}


def precision_of(given: str | Precision) -> Precision:
    """Return a precision by name: `fp32` (every array as it is), `bf16`, or `fp16` with dynamic loss scaling.

    Raises:
        ConfigError: for another name.

    """
    if isinstance(given, Precision):
        return given
    one_of("precision", given, NAMED)
    return NAMED[given]


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is an array of real floating numbers; random keys are not."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def wide(dtype: Any) -> Any:
    """Return the dtype to accumulate in: fp32 for shorter floating numbers, else the dtype itself."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether every element of every floating array is finite."""
    checks = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(checks).all() if checks else jnp.asarray(True)
