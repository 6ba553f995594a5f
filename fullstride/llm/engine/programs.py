"""Programs of an engine: a mixed step of chunks and decode rows, and a burst of decode steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fullstride.llm.config import ModelConfig
from fullstride.llm.engine.fixed_burst import RowState, accept_drawn, decode_fixed_steps, ended
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.engine.state import EngineState, sampler
from fullstride.llm.engine.wire import (
    CHUNK,
    DECODE,
    LAST_CHUNK,
    POOL_LAST,
    POOL_MEAN,
    DecodeInput,
    MixedInput,
    RowParams,
)
from fullstride.llm.kernels.interface import Kernels, Sampled, StepBatch
from fullstride.llm.kernels.xla.sampling import drawn, unscored
from fullstride.llm.models import rope
from fullstride.llm.models.decoder import hidden_states, logits
from fullstride.llm.models.layer_parts import norm
from fullstride.llm.models.parameters import Weights

# Most probable tokens that a step reports if logprobs are requested: as many as OpenAI's API returns.
TOP = 20


class StepOutput(NamedTuple):
    """Results of a step that the host reads; a token of -1 stands for no token.

    Attributes:
        sampled: sampled tokens, with axes step and row.
        prompt: logprobs of a prompt's own tokens, with axes tile and token; None for a burst.
        pooled: for each row the sum of its chunk's last hidden states that are pooled, fp32; None for a quick step.

    """

    sampled: Sampled
    prompt: Sampled | None
    pooled: Float[Array, "D hidden"] | None = None


class Programs:
    """The functions that are compiled, for one model, set of kernels and sizes."""

    def __init__(self, model: ModelConfig, kernels: Kernels, sizes: CompiledShapes):
        """Nothing is traced yet."""
        self.model, self.kernels, self.sizes = model, kernels, sizes

    def decode(
        self, weights: Weights, state: EngineState, packed: Int[Array, " words"], rows: int
    ) -> tuple[EngineState, StepOutput]:
        """Up to `head[0]` steps of each row, until all have ended, or one has and `head[1]` is set."""
        host = DecodeInput.of(packed, rows)
        steps, early = host.head[0], host.head[1] > 0
        adapters = _adapters(weights, state, host.slots)
        blank = _blank(self.sizes.steps, rows)

        def going(carry):
            i, state, _, ended = carry
            live = state.alive[host.slots] & (state.length[host.slots] < host.capacity)
            return (i < steps) & jnp.any(live) & ~(early & ended)

        def step(carry):
            i, state, out, _ = carry
            live = state.alive[host.slots] & (state.length[host.slots] < host.capacity)
            where = RowState(state.last[host.slots], state.length[host.slots], live)
            scores, state = self._scores(weights, state, self._rows(where, host, adapters))
            state, sampled = self._choose(state, scores, host.slots, live)
            ended = jnp.any(live & ~state.alive[host.slots])
            return i + 1, state, jax.tree.map(lambda a, b: a.at[i].set(b), out, sampled), ended

        _, state, out, _ = lax.while_loop(going, step, (jnp.int32(0), state, blank, jnp.bool_(False)))
        return state, StepOutput(out, None)

    def quick_decode(
        self, weights: Weights, state: EngineState, packed: Int[Array, " words"], rows: int
    ) -> tuple[EngineState, StepOutput]:
        """Decode rows that need at most a temperature; see `fixed_burst`."""
        host = DecodeInput.of(packed, rows)
        adapters = _adapters(weights, state, host.slots)

        def scores(state: EngineState, now: RowState) -> tuple[Float[Array, "D vocab"], EngineState]:
            return self._scores(weights, state, self._rows(now, host, adapters))

        state, tokens = decode_fixed_steps(state, host, self.sizes.steps, scores)
        return state, StepOutput(unscored(tokens, TOP), None)

    def mixed(
        self,
        weights: Weights,
        state: EngineState,
        packed: Int[Array, " words"],
        rows: int,
        tiles: int,
        quick: bool = False,
    ) -> tuple[EngineState, StepOutput]:
        """One step of decode rows, and of chunks of prompts, the last of which have their first token chosen.

        A quick one is of rows that want a temperature at most, and no logprobs of prompts.
        """
        host = MixedInput.of(packed, rows, tiles, self.sizes.tile)
        state = _admit(state, host)
        live = (host.kinds == DECODE) & state.alive[host.slots] & (state.length[host.slots] < host.capacity)
        where = RowState(state.last[host.slots], state.length[host.slots], live)
        batch = self._tiles(self._rows(where, host, _adapters(weights, state, host.slots)), host)
        hidden, state = self._forward(weights, state, batch)
        place = jnp.where(host.kinds == LAST_CHUNK, host.at, jnp.arange(rows))
        # A chunk's row stands where its last token is: choosing moves it on by one, as it does a decode row.
        chosen = live | (host.kinds == LAST_CHUNK)
        scores = logits(self.model, self.kernels, weights, hidden[place])
        state, sampled = self._choose(state, scores, host.slots, chosen, quick)
        sampled = jax.tree.map(lambda x: x[None], sampled)
        if quick:
            return state, StepOutput(sampled, None)
        tiled = hidden[rows:].reshape(tiles, self.sizes.tile, -1)
        return state, StepOutput(sampled, self._prompt(weights, tiled, host), self._pooled(weights, tiled, host))

    def verify(
        self,
        weights: Weights,
        state: EngineState,
        packed: Int[Array, " words"],
        rows: int,
        quick: bool = False,
    ) -> tuple[EngineState, StepOutput]:
        """One step of each row's newest token and of drafts of those that follow, as a tile of its own.

        Each token is chosen as a decode step chooses it, from the same noise; a row goes on while its drafts are what
        was chosen. So the tokens are those of decode steps, whatever the drafts, and a draft is accepted with the
        probability that the model gives it, as in speculative sampling (arXiv:2211.17192) of drafts that are certain.
        """
        host = DecodeInput.of(packed, rows, self.sizes.drafts)
        slots = host.slots
        live = state.alive[slots] & (state.length[slots] < host.capacity)
        tokens = jnp.concatenate([state.last[slots][:, None], host.drafts], axis=1)
        places = state.length[slots][:, None] + jnp.arange(tokens.shape[1])
        known = live[:, None] & (tokens >= 0) & (places < host.capacity[:, None])
        hidden, state = self._forward(weights, state, self._drafted(weights, state, host, tokens, known, places))
        scores = logits(self.model, self.kernels, weights, hidden).reshape(*tokens.shape, -1)
        if quick:
            state, chosen = accept_drawn(state, host, scores, live)
            return state, StepOutput(unscored(chosen, TOP), None)
        # A row ends behind its last draft.
        following = jnp.pad(host.drafts, ((0, 0), (0, 1)), constant_values=-1)

        def step(carry: tuple[EngineState, Array], inputs: tuple[Array, Array]) -> tuple[Any, Sampled]:
            (state, going), (scores, draft) = carry, inputs
            state, sampled = self._choose(state, scores, slots, going)
            free = state.length[slots] < host.capacity
            return (state, going & (sampled.token == draft) & state.alive[slots] & free), sampled

        # The KV cache is not looped over, so that no copy of it can be.
        small = state._replace(pool=state.pool[:0], scratch=())
        (small, _), sampled = lax.scan(step, (small, live), (scores.swapaxes(0, 1), following.T))
        return small._replace(pool=state.pool, scratch=state.scratch), StepOutput(sampled, None)

    def scratch(self) -> tuple[Array, ...]:
        """Allocate the scratch memory of steps that are one operation."""
        whole = self.kernels.fused_step
        return () if whole is None else tuple(whole.scratch(n) for n in self.sizes.row_buckets if n <= whole.rows)

    def _rows(self, now: RowState, host: DecodeInput | MixedInput, adapters: Int[Array, " D"] | None) -> StepBatch:
        """One token of each live row: the newest, at the place after those that have keys."""
        tables = self._by_group(host.tables)
        tokens, positions = jnp.where(now.alive, now.last, 0), jnp.where(now.alive, now.length, -1)
        slots = _slots(positions[:, None], tables, self.sizes.block)[..., 0]
        none = tables[..., :0, :]
        return self._batch(tokens, positions, slots, tables, none)._replace(adapters=adapters)

    def _tiles(self, batch: StepBatch, host: MixedInput) -> StepBatch:
        """Append the chunks' tiles to a batch of rows."""
        offsets = jnp.arange(self.sizes.tile)
        positions = jnp.where(offsets < host.tile_counts[:, None], host.tile_starts[:, None] + offsets, -1)
        tables = self._by_group(host.tables[host.tile_rows])
        slots = _slots(positions, tables, self.sizes.block)
        pairs = ((batch.tokens, host.tokens), (batch.positions, positions), (batch.slots, slots))
        tokens, where, to = (
            jnp.concatenate([rows, tiles.reshape(*rows.shape[:-1], -1)], axis=-1) for rows, tiles in pairs
        )
        owners = batch.adapters
        if owners is not None:
            owners = jnp.concatenate([owners, owners[host.tile_rows]])
        return self._batch(tokens, where, to, batch.rows, tables)._replace(adapters=owners)

    def _drafted(
        self,
        weights: Weights,
        state: EngineState,
        host: DecodeInput,
        tokens: Int[Array, "D Q"],
        known: Bool[Array, "D Q"],
        places: Int[Array, "D Q"],
    ) -> StepBatch:
        """Batch of a tile for each row; what is not known is padding."""
        tables, positions = self._by_group(host.tables), jnp.where(known, places, -1)
        slots = _slots(positions, tables, self.sizes.block)
        batch = self._batch(
            jnp.where(known, tokens, 0).reshape(-1),
            positions.reshape(-1),
            slots.reshape(*slots.shape[:-2], -1),
            tables[..., :0, :],
            tables,
        )
        return batch._replace(adapters=_adapters(weights, state, host.slots))

    def _by_group(self, tables: Int[Array, "N words"]) -> Int[Array, "*groups N W"]:
        """Block tables, with an axis of groups of layers if there are several."""
        groups = len(self.sizes.windows)
        return tables if groups == 1 else tables.reshape(len(tables), groups, -1).swapaxes(0, 1)

    def _batch(self, tokens: Array, positions: Array, slots: Array, rows: Array, tiles: Array) -> StepBatch:
        return StepBatch(tokens, positions, slots, rows, tiles, *rope.step_angles(self.model, positions))

    def _forward(self, weights: Weights, state: EngineState, batch: StepBatch) -> tuple[Array, EngineState]:
        hidden, pool = hidden_states(self.model, self.kernels, weights, state.pool, batch, self.sizes.block)
        return hidden, state._replace(pool=pool)

    def _scores(
        self, weights: Weights, state: EngineState, batch: StepBatch
    ) -> tuple[Float[Array, "D vocab"], EngineState]:
        """Return the logits of the tokens that follow those of decode rows."""
        whole, rows = self.kernels.fused_step, batch.rows.shape[-2]
        if whole is None or rows > whole.rows:
            hidden, state = self._forward(weights, state, batch)
            return logits(self.model, self.kernels, weights, hidden), state
        place, scratch = self.sizes.row_buckets.index(rows), list(state.scratch)
        packed, embed = weights.packed, weights.embed
        scores, pool, scratch[place] = whole.logits(packed, embed, state.pool, scratch[place], batch, self.sizes.block)
        return scores, state._replace(pool=pool, scratch=tuple(scratch))

    def _choose(
        self,
        state: EngineState,
        scores: Float[Array, "D vocab"],
        slots: Array,
        live: Bool[Array, " D"],
        quick: bool = False,
    ) -> tuple[EngineState, Sampled]:
        """The next token of the live rows, and where that leaves them."""
        length = state.length[slots] + 1
        asked = sampler(state, slots, length)
        sampled = unscored(drawn(scores, asked), TOP) if quick else self.kernels.sample(scores, asked, TOP)
        params, token = RowParams.of(state.params[slots]), sampled.token
        last = ended(params, token, length)
        # What is not live writes to nobody's row.
        to = jnp.where(live, slots, self.sizes.rows)
        # Penalties alone read counts. A row has them from its admission, which sets its counts anew, to its end; no row
        # of a quick step has any.
        counts = state.counts if quick else state.counts.at[to, token].add(1)
        state = state._replace(
            last=state.last.at[to].set(token),
            length=state.length.at[to].set(length),
            alive=state.alive.at[to].set(~last & live),
            counts=counts,
        )
        return state, sampled._replace(token=jnp.where(live, token, -1))

    def _prompt(self, weights: Weights, hidden: Array, host: MixedInput) -> Sampled:
        """Compute logprobs of the prompt's next tokens, a tile at a time; nothing is computed if none is requested."""

        def tile(pair):
            scores = logits(self.model, self.kernels, weights, pair[0])
            return self.kernels.score(scores, jnp.maximum(pair[1], 0), TOP)

        targets: Int[Array, "N Q"] = host.targets
        tiles = targets.shape[0]
        blank = _blank(tiles, self.sizes.tile)
        return lax.cond(jnp.any(targets >= 0), lambda: lax.map(tile, (hidden, targets)), lambda: blank)

    def _pooled(
        self, weights: Weights, hidden: Float[Array, "N Q hidden"], host: MixedInput
    ) -> Float[Array, "D hidden"]:
        """Sum the normalized last hidden states of the tokens that a row pools; zeros if no row does."""
        rows, (tiles, tile, width) = host.slots.shape[0], hidden.shape
        flags, owner = RowParams.of(host.params).flags, host.tile_rows
        place = jnp.arange(tiles * tile).reshape(tiles, tile)
        ends = ((host.kinds == LAST_CHUNK) & (flags & POOL_LAST > 0))[owner, None] & (
            host.at[owner, None] - rows == place
        )
        taken = (ends | (flags & POOL_MEAN > 0)[owner, None]) & (jnp.arange(tile) < host.tile_counts[:, None])

        def sums() -> Float[Array, "D hidden"]:
            normal = norm(self.model, hidden, weights.norm).astype(jnp.float32)
            each = jnp.where(taken[..., None], normal, 0).sum(1)
            own = (owner == jnp.arange(rows)[:, None]).astype(jnp.float32)
            return jnp.einsum("dn,nh->dh", own, each, precision=lax.Precision.HIGHEST)

        return lax.cond(jnp.any(taken), sums, lambda: jnp.zeros((rows, width), jnp.float32))


def _adapters(weights: Weights, state: EngineState, slots: Int[Array, " D"]) -> Int[Array, " D"] | None:
    """Return the adapter slot of each row; None if there are no slots."""
    return None if weights.layers[0].adapters is None else RowParams.of(state.params[slots]).adapter


def _blank(outer: int, inner: int) -> Sampled:
    return unscored(jnp.full((outer, inner), -1, jnp.int32), TOP)


def _admit(state: EngineState, host: MixedInput) -> EngineState:
    """Advance the chunks' rows to the end of their chunks; a row with prompt left is not alive yet."""
    chunk = (host.kinds == CHUNK) | (host.kinds == LAST_CHUNK)
    to = jnp.where(chunk, host.slots, state.last.shape[0] - 1)
    return state._replace(
        params=state.params.at[to].set(host.params),
        # Choosing a token adds the one whose key the step makes; see `_choose`.
        length=state.length.at[to].set(host.length - 1),
        alive=state.alive.at[to].set(False),
    )


def _slots(positions: Int[Array, "N Q"], tables: Int[Array, "*groups N W"], block: int) -> Int[Array, "*groups N Q"]:
    """Return the KV cache slots of these positions; padding goes to block 0."""
    inside = jnp.maximum(positions, 0)
    numbers = jnp.broadcast_to(inside // block, (*tables.shape[:-1], positions.shape[1]))
    found = jnp.take_along_axis(tables, numbers, axis=-1) * block + inside % block
    return jnp.where(positions < 0, 0, found)
