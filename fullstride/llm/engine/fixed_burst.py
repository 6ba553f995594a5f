"""Burst of decode steps, and verification of drafts, for rows that need at most a temperature, without a condition.

A GPU's host reads a condition before it launches what follows: the GPU waits for it, and a dispatch comes back only
when its last condition is known, so that nothing can be planned meanwhile. Steps whose number is known are launched
ahead; rows that have ended stand still.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fullstride.llm.engine.state import EngineState, sampler
from fullstride.llm.engine.wire import DecodeInput, RowParams
from fullstride.llm.kernels.interface import Sampler
from fullstride.llm.kernels.xla.sampling import drawn


class RowState(NamedTuple):
    """Progress of the rows of a decode step; see `EngineState`."""

    last: Int[Array, " D"]
    length: Int[Array, " D"]
    alive: Bool[Array, " D"]


class BurstCarry(NamedTuple):
    """Loop state of a burst: steps done, their tokens, and whether a row has ended."""

    steps: Int[Array, ""]
    state: EngineState
    now: RowState
    tokens: Int[Array, "S D"]
    ended: Bool[Array, ""]


class BurstInputs(NamedTuple):
    """Inputs that stay constant during a burst."""

    host: DecodeInput
    params: RowParams
    sampler: Sampler

    def live(self, walk: BurstCarry) -> Bool[Array, " D"]:
        """Return which rows run another step."""
        steps, early = self.host.head
        going = (walk.steps < steps) & ~((early > 0) & walk.ended)
        return going & walk.now.alive & (walk.now.length < self.host.capacity)


# Of the tokens after those of the rows that go on, with the state that comes after.
Scores = Callable[[EngineState, RowState], tuple[Float[Array, "D vocab"], EngineState]]


def decode_fixed_steps(
    state: EngineState, host: DecodeInput, steps: int, scores: Scores
) -> tuple[EngineState, Int[Array, "S D"]]:
    """Run up to `host.head[0]` steps of each row, until it has ended, or until any has if `host.head[1]` is set.

    Args:
        state: state of the engine.
        host: rows, and the number of their steps.
        steps: number of steps to launch.
        scores: function that runs a step of the model.

    Returns:
        The state, and the tokens of each step, -1 for none.

    """
    slots = host.slots
    burst = BurstInputs(host, RowParams.of(state.params[slots]), sampler(state, slots, state.length[slots]))
    walk = BurstCarry(
        jnp.int32(0),
        state,
        RowState(state.last[slots], state.length[slots], state.alive[slots]),
        jnp.full((steps, slots.shape[0]), -1, jnp.int32),
        jnp.bool_(False),
    )
    walk = lax.fori_loop(0, steps, partial(_step, burst, scores), walk)
    return _settled(walk, slots), walk.tokens


def accept_drawn(
    state: EngineState, host: DecodeInput, scores: Float[Array, "D Q vocab"], live: Bool[Array, " D"]
) -> tuple[EngineState, Int[Array, "Q D"]]:
    """Choose all tokens that drafts may lead to at once, and keep each row's up to the first that is not its draft.

    Args:
        state: state of the engine, with the keys of the drafts.
        host: rows and their drafts.
        scores: logits of the tokens after the newest one of a row, and after each of its drafts.
        live: which rows run.

    Returns:
        The state, and the tokens of each row, -1 for none.

    """
    slots, (rows, count) = host.slots, scores.shape[:2]
    # Positions of the chosen tokens; a row ends behind its last draft.
    places = state.length[slots][:, None] + 1 + jnp.arange(count)
    drafts = jnp.pad(host.drafts, ((0, 0), (0, 1)), constant_values=-1)
    flat = jnp.repeat(slots, count)
    token = drawn(scores.reshape(rows * count, -1), sampler(state, flat, places.reshape(-1)))
    last = ended(RowParams.of(state.params[flat]), token, places.reshape(-1)).reshape(rows, count)
    token = token.reshape(rows, count)
    onward = (token == drafts) & ~last & (places < host.capacity[:, None])
    before = jnp.pad(onward[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    going = live[:, None] & (lax.cummin(before.astype(jnp.int32), axis=1) > 0)
    newest = jnp.maximum(going.sum(1) - 1, 0)[:, None]
    to = jnp.where(live, slots, state.last.shape[0] - 1)
    state = state._replace(
        last=state.last.at[to].set(jnp.take_along_axis(token, newest, 1)[:, 0]),
        length=state.length.at[slots].add(going.sum(1)),
        alive=state.alive.at[to].set(live & ~jnp.take_along_axis(last, newest, 1)[:, 0]),
    )
    return state, jnp.where(going, token, -1).T


def ended(params: RowParams, token: Int[Array, " D"], length: Int[Array, " D"]) -> Bool[Array, " D"]:
    """Return whether `token` ends its row; `length` tokens precede it."""
    return jnp.any(params.stops == token[:, None], axis=1) | (length + 1 >= params.limit)


def _step(burst: BurstInputs, scores: Scores, _: Int[Array, ""], walk: BurstCarry) -> BurstCarry:
    live, now = burst.live(walk), walk.now
    logits, state = scores(walk.state, now._replace(alive=live))
    token, length = drawn(logits, burst.sampler._replace(position=now.length + 1)), now.length + live
    last = live & ended(burst.params, token, length)
    after = RowState(jnp.where(live, token, now.last), length, now.alive & ~last)
    tokens = walk.tokens.at[walk.steps].set(jnp.where(live, token, -1))
    return BurstCarry(walk.steps + 1, state, after, tokens, walk.ended | jnp.any(last))


def _settled(walk: BurstCarry, slots: Int[Array, " D"]) -> EngineState:
    """Return the state with its rows advanced by the burst."""
    state, now = walk.state, walk.now
    return state._replace(
        last=state.last.at[slots].set(now.last),
        length=state.length.at[slots].set(now.length),
        alive=state.alive.at[slots].set(now.alive),
    )
