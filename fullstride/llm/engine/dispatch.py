"""Dispatch of a plan to the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fullstride.llm.engine import wire
from fullstride.llm.engine.programs import StepOutput
from fullstride.llm.engine.runner import Runner
from fullstride.llm.engine.scheduler import Chunk, StepPlan
from fullstride.llm.engine.sequence import Sequence
from fullstride.llm.engine.shapes import CompiledShapes
from fullstride.llm.engine.wire import DecodeInput, MixedInput, RowParams
from fullstride.llm.kernels.interface import SamplingNeeds, needs_full_sampler
from fullstride.llm.sampling_params import SMALLEST

# Below it a temperature leaves only the most probable token, except for logits that fp32 cannot divide by it.
COLDEST = 1e-5
POOL_FLAGS = {None: 0, "last": wire.POOL_LAST, "mean": wire.POOL_MEAN}


@dataclass
class InFlightStep:
    """Dispatched plan and its pending results; `began` is when it was planned, by `perf_counter`."""

    plan: StepPlan
    out: StepOutput
    began: float


def dispatch(runner: Runner, plan: StepPlan, began: float) -> InFlightStep:
    """Dispatch a plan that was begun at this time."""
    for sequence in plan.admitted:
        if _is_special(sequence):
            bias, prompt = sequence.request.params.logit_bias or {}, sequence.request.prompt
            packed = np.full(wire.HISTORY.size + runner.sizes.max_length, -1, np.int32)
            wire.HISTORY.put(packed, row=sequence.row, prompt=len(prompt), bias=0)
            parts = wire.HISTORY.of(packed)
            parts["bias_ids"][: len(bias)] = list(bias)
            parts["bias"][: len(bias)] = wire.words(*bias.values())
            parts["tokens"][: len(sequence.tokens)] = sequence.tokens
            runner.set("history", packed)
    for sequence in [*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.last)]:
        if sequence.matcher is not None:
            packed = np.empty(wire.MASK.size + len(sequence.mask), np.int32)
            wire.MASK.put(packed, row=sequence.row, bits=np.asarray(sequence.mask, np.uint32).view(np.int32))
            runner.set("mask", packed)
    width = max(len(table.blocks) for sequence in plan.sequences for table in sequence.tables)
    width = next(size for size in runner.sizes.widths if size >= width)
    out = _mixed(runner, plan, width) if plan.chunks else _decode(runner, plan, width)
    # The copy to the host begins as soon as the results are there.
    wanted = any(sequence.request.params.logprobs is not None for sequence in plan.sequences)
    for array in out.sampled if wanted else out.sampled[:1]:
        array.copy_to_host_async()
    return InFlightStep(plan, out, began)


def _decode(runner: Runner, plan: StepPlan, width: int) -> StepOutput:
    drafts = runner.sizes.drafts if plan.drafts else 0
    rows = next(size for size in runner.sizes.row_buckets if size >= len(plan.decodes))
    packed = np.zeros(DecodeInput.size(rows, len(runner.sizes.windows) * width, drafts), np.int32)
    host = DecodeInput.of(packed, rows, drafts)
    host.head[:] = plan.steps, plan.early
    host.slots[:] = runner.sizes.rows
    _tables(host, plan.sequences, runner.sizes.block)
    plain = not any(map(_asks, plan.decodes))
    if plan.drafts:
        host.drafts[:] = -1
        for row, draft in enumerate(plan.drafts):
            host.drafts[row, : len(draft)] = draft
        return runner.run(("verify", rows, 0, width), packed, plain)
    # Do not launch steps that no row can need; if a step is one operation, such a step costs nothing.
    full = runner.is_whole(rows) or (
        plan.steps == runner.sizes.steps
        and any(sequence.request.limit >= sequence.max_length_in_flight for sequence in plan.decodes)
    )
    return runner.run(("decode", rows, 0, width), packed, full and plain)


def _mixed(runner: Runner, plan: StepPlan, width: int) -> StepOutput:
    sizes, rows = runner.sizes, len(plan.decodes)
    needed = sum(-(-chunk.count // sizes.tile) for chunk in plan.chunks)
    tiles = next(size for size in sizes.tile_buckets if size >= needed)
    packed = np.zeros(MixedInput.size(sizes.rows, tiles, sizes.tile, len(sizes.windows) * width), np.int32)
    host = MixedInput.of(packed, sizes.rows, tiles, sizes.tile)
    host.slots[:], host.targets[:] = sizes.rows, -1
    _tables(host, plan.sequences, sizes.block)
    host.kinds[:rows] = wire.DECODE
    first = 0
    for row, chunk in enumerate(plan.chunks, rows):
        first = _chunk(host, row, first, chunk, sizes)
    return runner.run(("mixed", sizes.rows, tiles, width), packed, not any(map(_asks, plan.sequences)))


def _tables(host: Any, sequences: list[Sequence], block: int) -> None:
    for row, sequence in enumerate(sequences):
        host.slots[row] = sequence.row
        host.capacity[row] = sequence.num_blocks * block
        own = host.tables[row].reshape(len(sequence.tables), -1)
        for blocks, table in zip(own, sequence.tables, strict=True):
            blocks[: len(table.blocks)] = table.blocks


def _chunk(host: MixedInput, row: int, first: int, chunk: Chunk, sizes: CompiledShapes) -> int:
    """Write a chunk's row and its tiles from `first` on; return the next free tile."""
    sequence, count = chunk.sequence, chunk.count
    tiles = -(-count // sizes.tile)
    host.kinds[row] = wire.LAST_CHUNK if chunk.last else wire.CHUNK
    host.at[row] = len(host.slots) + first * sizes.tile + count - 1
    host.length[row] = chunk.start + count
    host.params[row] = params(sequence)
    mine = slice(first, first + tiles)
    host.tile_rows[mine] = row
    host.tile_starts[mine] = chunk.start + sizes.tile * np.arange(tiles)
    host.tile_counts[mine] = np.minimum(sizes.tile, count - sizes.tile * np.arange(tiles))
    flat = host.tokens[mine].reshape(-1)
    flat[:count] = sequence.tokens[chunk.start : chunk.start + count]
    host.tokens[mine] = flat.reshape(tiles, -1)
    if sequence.prompt_logprobs is not None and not sequence.prompt_logprobs_sent:
        following = sequence.request.prompt[chunk.start + 1 : chunk.start + count + 1]
        targets = np.full(tiles * sizes.tile, -1, np.int32)
        targets[: len(following)] = following
        host.targets[mine] = targets.reshape(tiles, -1)
    return first + tiles


def params(sequence: Sequence) -> np.ndarray:
    """Return the parameters of the row; see `wire.RowParams`."""
    asked, wanted, packed = sequence.request.params, sampling_needs(sequence), np.full(wire.PARAMS.size, -1, np.int32)
    numbers = {
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "min_p": wanted.min_p,
        "repetition": asked.repetition_penalty,
        "presence": asked.presence_penalty,
        "frequency": asked.frequency_penalty,
    }
    flags = wire.SPECIAL * wanted.special | wire.MASKED * (sequence.matcher is not None)
    flags |= POOL_FLAGS[sequence.request.pooling]
    wire.PARAMS.put(
        packed,
        limit=sequence.request.limit,
        min_until=len(sequence.request.prompt) + asked.min_tokens,
        top_k=wanted.top_k,
        flags=flags | wire.WANTED * wanted.wanted,
        adapter=sequence.request.slot,
        key=np.asarray(sequence.key, np.uint32).view(np.int32),
        numbers=wire.words(*(numbers[name] for name in wire.NUMBERS)),
    )
    stops = sequence.request.stops
    RowParams.of(packed).stops[: len(stops)] = stops
    return packed


def sampling_needs(sequence: Sequence) -> SamplingNeeds:
    """Return the sampling settings of a sequence as the device gets them; they never change."""
    asked = sequence.request.params
    return SamplingNeeds(
        special=_is_special(sequence),
        wanted=asked.logprobs is not None,
        temperature=asked.temperature if asked.temperature >= COLDEST else 0.0,
        top_k=min(max(0, asked.top_k), 2**31 - 1),
        # The device takes what is below fp32's normal numbers for 0, which no set of tokens has.
        top_p=max(asked.top_p, SMALLEST),
        min_p=asked.min_p,
    )


def _asks(sequence: Sequence) -> bool:
    """Return whether a sequence needs more than a temperature: also logprobs of its prompt, or hidden states."""
    own = sequence.prompt_logprobs is not None or sequence.request.pooling is not None
    return own or needs_full_sampler(sampling_needs(sequence))


def _is_special(sequence: Sequence) -> bool:
    asked = sequence.request.params
    penalties = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
    return penalties != (1, 0, 0) or bool(asked.logit_bias or sequence.matcher is not None or asked.min_tokens)
