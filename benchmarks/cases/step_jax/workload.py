"""What the ways of calling a step are compared on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import optax

from fullstride.measure.roofline import Ceilings, Floor, floor

Trees = tuple[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A model with its loss, optimizer and batch."""

    name: str  # for the table
    model: Callable[[], Any]  # makes the model; the same one each time
    loss_fn: Callable[[Any, Any, Any], Any]  # scalar loss of (model, batch, key)
    optimizer: optax.GradientTransformation  # optax's
    batch: Any  # on the device
    key: Any  # what the loss gets
    flops: float = 0.0  # operations of a step's products, 2 a multiply-add, backward included; 0 where there is none

    def fresh(self) -> Trees:
        """A model and its optimizer's state whose buffers are nobody else's."""
        model = self.model()
        trees = model, self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, trees)

    def update(self, model: Any, opt_state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        """The step that all ways share."""
        loss, grads = eqx.filter_value_and_grad(self.loss_fn)(model, batch, key)
        updates, opt_state = self.optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def update_of(self, given: Any, model: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        """The same with what is not donated first, as `donate="all-except-first"` wants it."""
        return self.update(model, opt_state, *given)

    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays of model and state."""
        trees = eqx.filter_eval_shape(self.fresh)
        return [x for x in jax.tree.leaves(trees) if isinstance(x, jax.ShapeDtypeStruct)]

    def floor(self, ceilings: Ceilings) -> Floor:
        """The time of the products alone, and of reading and writing every array once."""
        moved = 2 * sum(x.size * x.dtype.itemsize for x in self.arrays())
        return floor(self.flops, moved, ceilings)
