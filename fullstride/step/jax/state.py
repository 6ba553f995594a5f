"""State of a training step: its leaves in one flat tuple, its trees built on first access."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from fullstride.errors import ConfigError
from fullstride.step.jax.grouped import GroupedLeaves
from fullstride.step.jax.metrics import NOTHING_YET, Metrics
from fullstride.step.jax.nnx import NnxModels
from fullstride.step.jax.trees.ownership import is_deleted, private, settled
from fullstride.step.jax.trees.structure import Structure
from fullstride.step.jax.update import StepCarry

Buffers = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Blueprint:
    """Structures that all states of one step share; compared by identity, so that a lookup costs nothing.

    Attributes:
        model: structure of the model; its groups are the trainable arrays and the fixed ones.
        carry: structure of the `StepCarry`, whose first leaves are the trainable arrays.
        layout: layout of the carry's leaves in buffers.
        trainable: number of trainable arrays.
        nnx: view of a model that is made of `flax.nnx.Module`.

    """

    model: Structure
    carry: Structure
    layout: GroupedLeaves
    trainable: int
    nnx: NnxModels | None = None

    def rest(self, fixed: Buffers) -> Any:
        """The model without its trainable arrays."""
        return self.model.build((None,) * self.trainable, fixed)

    def same_as(self, other: "Blueprint") -> bool:
        """Return whether states of one blueprint can be used with the other."""
        return self.model is other.model and self.carry is other.carry and self.layout == other.layout


@jtu.register_pytree_node_class
class State:
    """Training state that a step takes and returns: a pytree whose leaves are the buffers themselves.

    If the step donates, a state may be used once: the buffers go into the next state.

    Attributes:
        buffers: the arrays that a step rewrites, as the layout has them.
        fixed: the model's arrays that are not trained.
        blueprint: the structures, shared by all states of a step.
        fresh: whether no step returned it, so that nothing says yet on which device its arrays shall stay.
        late: metrics of the step that returned it; they are no part of the pytree, so that copies have none.

    """

    __slots__ = ("_carry", "_count", "_model", "blueprint", "buffers", "fixed", "fresh", "late")

    def __init__(
        self,
        buffers: Buffers,
        fixed: Buffers,
        blueprint: Blueprint,
        count: int | None = None,
        fresh: bool = False,
        late: Metrics = NOTHING_YET,
    ):
        """Hold the arrays; `count` saves reading the number of steps from the device."""
        self.buffers, self.fixed, self.blueprint, self.fresh, self.late = buffers, fixed, blueprint, fresh, late
        self._count, self._carry, self._model = count, None, None

    @property
    def carry(self) -> StepCarry:
        """Trees that the step works on, built on first access.

        Raises:
            ConfigError: if the state was donated.

        """
        if is_deleted(self.buffers):
            raise self.donated()
        if self._carry is None:
            self._carry = self.blueprint.carry.build(self.blueprint.layout.unpack_eagerly(self.buffers))
        return self._carry

    def settle(self, *given: Any) -> None:
        """Commit the arrays to a device, if what a step is given is committed to one; NumPy's are copied."""
        buffers, self.fixed = private((self.buffers, self.fixed))
        self.buffers, self.fresh = settled(buffers, self.fixed, given), False

    def donated(self) -> ConfigError:
        """Return the error for a state whose buffers were donated."""
        return ConfigError(
            f"state: that of step {self._count} was donated to an earlier call; use the state which that call "
            "returned, or build the step with donate=False"
        )

    @property
    def model(self) -> Any:
        """Model with its current parameters; a donating step invalidates them, so copy those you keep."""
        carry = self.carry
        if self._model is None:
            self._model = self._with(carry.params)
        return self._model

    @property
    def ema_model(self) -> Any:
        """Model with the averaged parameters, in the parameters' dtypes; None if the step keeps no average."""
        carry = self.carry
        if carry.ema is None:
            return None
        return self._with(jax.tree.map(lambda a, p: a.astype(p.dtype), carry.ema, carry.params))

    @property
    def opt_state(self) -> Any:
        """State of the optimizer, in optax's structure."""
        return self.carry.opt_state

    @property
    def nn_state(self) -> Any:
        """State that the loss itself reads and rewrites, such as BatchNorm's statistics; None without it."""
        return self.carry.nn_state

    @property
    def step(self) -> int:
        """Number of steps taken; waits for the device only if the state was made by hand."""
        if self._count is None:
            self._count = int(jax.tree.leaves(self.carry.taken)[0])
        return self._count

    def write_to(self, model: Any, optimizer: Any = None) -> None:
        """Write copies of the arrays into the user's own `flax.nnx.Module` (or dict) and `nnx.Optimizer`.

        Raises:
            ConfigError: for a model that cannot be written to, or of another structure.

        """
        if self.blueprint.nnx is None:
            raise ConfigError("write_to: only a flax.nnx.Module can be written to; read state.model")
        tree = self.blueprint.model.build(jax.tree.leaves(self.carry.params), self.fixed)
        self.blueprint.nnx.write((tree, self.nn_state, self.opt_state), self.step, model, optimizer)

    def _with(self, params: Any) -> Any:
        tree, nnx = self.blueprint.model.build(jax.tree.leaves(params), self.fixed), self.blueprint.nnx
        return tree if nnx is None else nnx.merge(tree, self.nn_state)

    def tree_flatten(self) -> tuple[tuple[Buffers, Buffers], Blueprint]:
        return (self.buffers, self.fixed), self.blueprint

    @classmethod
    def tree_unflatten(cls, blueprint: Blueprint, children: tuple[Buffers, Buffers]) -> "State":
        return cls(*children, blueprint, fresh=True)

    def __repr__(self) -> str:
        """Show its size, without reading values."""
        size = sum(getattr(x, "nbytes", 0) for x in (*self.buffers, *self.fixed))
        return f"State({len(self.buffers)} buffers, {len(self.fixed)} fixed arrays, {size / 2**20:.1f} MiB)"
