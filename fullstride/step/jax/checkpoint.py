"""Checkpoints of a step's state by orbax: exact, by the leaves' paths, whatever their layout and devices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fullstride.errors import ConfigError
from fullstride.step.jax.state import State
from fullstride.step.jax.train_step import TrainStep


class Checkpoints:
    """Folder of checkpoints, written while training goes on.

    A checkpoint holds each leaf under its path, so that it can be read by a step with another layout or sharding.
    """

    def __init__(self, folder: str | Path, keep: int | None = None):
        """Open a folder, which is made if it is not there.

        Args:
            folder: on a local or mounted disk.
            keep: how many checkpoints are kept, the newest ones; None keeps all.

        """
        # Orbax takes seconds to import.
        import orbax.checkpoint as ocp

        self._ocp, self.folder = ocp, Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def save(self, state: State, extra: dict[str, Any] | None = None) -> None:
        """Write a state under its number of steps; the arrays are copied before this returns, and written after.

        Args:
            state: it may be given to the next step at once.
            extra: any JSON value, such as the position in the data.

        Raises:
            ConfigError: for a state that is no newer than what is there: orbax would leave it out without a word.

        """
        if (found := self.numbers()) and state.step <= found[-1]:
            raise ConfigError(
                f"{self.folder} has a checkpoint of step {found[-1]} and the state is of step {state.step}; expected a "
                "later one: save it to another folder"
            )
        args = self._ocp.args
        tree = args.StandardSave(
            jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, _filled(_named(state)))
        )
        self._manager.save(state.step, args=args.Composite(state=tree, extra=args.JsonSave(extra or {})))

    def restore(self, step: TrainStep, number: int | None = None) -> tuple[State, dict[str, Any]]:
        """Return the state of a step number, by default the newest, for the same model and optimizer; and `extra`.

        Raises:
            ConfigError: if there is no such checkpoint, or it has other leaves, shapes or dtypes.

        """
        found = self.numbers()
        number = found[-1] if number is None and found else number
        if number not in found:
            held = f"steps {', '.join(map(str, found))}" if found else "none"
            raise ConfigError(f"{self.folder} has no checkpoint of step {number}; it has {held}")
        kinds = _named(step.program.abstract(), step.program.leaves)
        self._check(number, kinds)
        args = self._ocp.args
        wanted = args.StandardRestore(jax.tree.map(_plain_kind, _filled(kinds)))
        got = self._manager.restore(number, args=args.Composite(state=wanted, extra=args.JsonRestore()))
        arrays = {name: _keyed(got["state"].get(name), kind) for name, kind in kinds.items()}
        names = step.program.blueprint.carry.names()
        fixed = tuple(arrays[name] for name in kinds if name.startswith("fixed"))
        return step.program.state([arrays[name] for name in names], fixed, number), got["extra"]

    def numbers(self) -> list[int]:
        """Return the steps that have checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Wait until everything is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end orbax's threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        """Use as `with Checkpoints(folder) as checkpoints`."""
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check(self, number: int, kinds: dict[str, Any]) -> None:
        self.wait()
        held = _shapes(self._manager.item_metadata(number)["state"])
        wanted = _shapes(jax.tree.map(_plain_kind, _filled(kinds)))
        for name in sorted(held.keys() | wanted.keys()):
            if held.get(name) != wanted.get(name):
                have, want = (kinds.get(name, "absent") for kinds in (held, wanted))
                raise ConfigError(f"{self.folder}, step {number}: {name} is {have}, the step expects {want}")


def _shapes(kinds: Any) -> dict[str, str]:
    return {name: f"{kind.dtype}[{','.join(map(str, kind.shape))}]" for name, kind in kinds.items()}


def _named(state: State, leaves: Any = None) -> dict[str, Any]:
    """Return every array of a state by its path."""
    blueprint = state.blueprint
    leaves = blueprint.layout.unpack_eagerly(state.buffers) if leaves is None else leaves
    fixed = {f"fixed{name}": x for name, x in zip(blueprint.model.names(1), state.fixed, strict=True)}
    return dict(zip(blueprint.carry.names(), leaves, strict=True)) | fixed


def _filled(arrays: dict[str, Any]) -> dict[str, Any]:
    """Those that have elements: orbax refuses the others, of which there is nothing to keep."""
    return {name: x for name, x in arrays.items() if x.size}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain_kind(x: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x


def _keyed(x: Any, kind: Any) -> Any:
    """Convert a stored leaf to the given kind: a random key from its data, zeros if nothing was stored (None)."""
    if x is None:
        like = _plain_kind(kind)
        x = jnp.zeros(like.shape, like.dtype)
    if not _is_key(kind):
        return x
    # A shape does not tell its implementation, a traced key does.
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), kind)
    return jax.random.wrap_key_data(x, impl=found[0])
