"""The engine: requests in, deltas out, a step at a time; for use by one thread."""

import logging
from collections import deque
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from fullstride.errors import ConfigError, one_line
from fullstride.llm.engine.adapters import AdapterTable, read_adapters, with_room
from fullstride.llm.engine.blocks import BlockManager, block_hashes, salted
from fullstride.llm.engine.build import Model, build_parts
from fullstride.llm.engine.collect import DeltaBuilder, collect
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.dispatch import InFlightStep, dispatch
from fullstride.llm.engine.programs import Programs
from fullstride.llm.engine.runner import Runner, compiles, keep
from fullstride.llm.engine.scheduler import Scheduler, StepPlan
from fullstride.llm.engine.sequence import Sequence as Running
from fullstride.llm.engine.speculation import Speculator, proposer_of
from fullstride.llm.engine.validate import RequestValidator
from fullstride.llm.outputs import Delta, EngineStats, FinishReason, Pooling
from fullstride.llm.progress import OnPrograms, OnProgress
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.weights.peft_adapter import Adapter

logger = logging.getLogger(__name__)

# Steps in flight at most: one runs while the one before it is read.
DEPTH = 2
# Tokens of a prompt by whose blocks an engine is chosen where there are several.
NAMED = 4096


class Engine:
    """Runner of requests on one device, or on several that share the model.

    Attributes:
        model: sizes of the model.
        tokenizer: the model's tokenizer, or None.
        sizes: compiled shapes; `max_length` limits the tokens of prompt and output.
        kernels: name of the kernel set in use.
        quantize: packing of the weights; `none` if they are numbers of `sizes.dtype`.
        devices: JAX devices that it runs on.
        dead: reason why nothing can run any more; None while the engine is alive.

    """

    def __init__(
        self,
        loaded: Model,
        config: EngineConfig | None = None,
        progress: OnPrograms | None = None,
        devices: Sequence[Any] | None = None,
        *,
        loading: OnProgress | None = None,
        adapters: Mapping[str, str | Path | Adapter] | None = None,
    ):
        """Put the weights on the devices and compile every program that will run.

        Args:
            loaded: model, as returned by `fullstride.llm.weights.load`.
            config: settings of the engine.
            progress: callback `(ready, total, cached)` for compiled programs: with 0 ready at first, then at least
                every second; `cached` of them an earlier start compiled (None if JAX's own cache serves).
            devices: JAX devices, `tensor_parallel_size` of them; the first ones unless given.
            loading: callback `(loaded, total)` for layers on the devices.
            adapters: LoRA adapters, or their folders, by the names that requests give; `load_adapter` adds others
                later if `max_loras` leaves room.

        Raises:
            ConfigError: for settings that the model or the devices cannot meet, or an adapter that is not the model's.

        """
        read = read_adapters(adapters or {}, loaded.config)
        config = with_room(config or EngineConfig(), read)
        # A draft model comes first, so that the KV cache has what it leaves.
        proposer = proposer_of(loaded, config, devices)
        parts = build_parts(loaded, config, devices, loading)
        self.model, self.tokenizer, self.devices = loaded.config, loaded.tokenizer, parts.devices
        self.kernels, self.sizes = parts.kernels.name, parts.sizes
        self.quantize = parts.quantize
        self.dead: str | None = None
        self._intake, self._caching = RequestValidator(self.model, self.sizes, self.tokenizer), config.prefix_cache
        self._speculator = None if proposer is None else Speculator(proposer, self.sizes)
        blocks = BlockManager(self.sizes.blocks, self._caching)
        self._scheduler = Scheduler(self.sizes, blocks, self._seat, self._speculator)
        self._flights: deque[InFlightStep] = deque()
        self._outbox: list[Delta] = []
        self._live: dict[str, list[Running]] = {}
        self._steps = self._prompt_tokens = self._generated = 0
        programs, keeps = Programs(self.model, parts.kernels, self.sizes), config.compile_cache and keep(self.devices)
        self._runner = Runner(programs, parts.weights, self.devices, progress, keeps=keeps)
        self._adapters = AdapterTable(config)
        for name, adapter in read.items():
            self._adapters.enter(name, adapter)
            self._place(name, set(self._adapters.loaded))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return tuple(self._adapters.loaded)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter in PEFT's form; nothing is compiled but, once, the copy into a slot.

        Raises:
            ConfigError: if it is not an adapter of this model, its name is taken, or there is no room for it.

        """
        (adapter,) = read_adapters({name: folder}, self.model).values()
        self._adapters.enter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            ConfigError: if there is none of this name, or requests with it are under way.

        """
        self._adapters.cache_key(name)
        if any(sequences[0].request.adapter == name for sequences in self._live.values()):
            raise ConfigError(f"adapter={name}: requests with it are under way; abort them, or wait for their end")
        self._adapters.leave(name)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arrived: float | None = None,
        adapter: str | None = None,
        pooling: Pooling | None = None,
        cache_salt: str = "",
    ) -> None:
        """Add a request; it runs when `step` is called.

        Args:
            request_id: name that no other running request has.
            prompt: token ids.
            params: sampling parameters and stop conditions.
            arrived: time of arrival by the caller's clock.
            adapter: name of a loaded LoRA adapter; None for the model itself.
            pooling: which tokens' last hidden states, after the final norm, the last delta has the mean of: the `last`
                one of the prompt or all (`mean`); None for no embedding. Give one output token.
            cache_salt: cached blocks are shared with requests of the same salt alone.

        Raises:
            ConfigError: if it can never run: too long, more than the pool holds, unknown token ids, more of
                something than the engine was made for, a grammar that is not understood, an adapter that is not loaded.

        """
        if self.dead is not None:
            raise ConfigError(f"the engine has failed: {self.dead}; create a new one")
        if request_id in self._live:
            raise ConfigError(f"request_id={request_id}: a request with this id is running")
        cache_key = self._adapters.cache_key(adapter)
        request = self._intake.request(request_id, prompt, params, arrived)
        request.adapter, request.pooling = adapter, pooling
        request.cache_key = salted(cache_key, cache_salt)
        sequences = self._intake.sequences(request)
        self.submit(sequences)

    def submit(self, sequences: list[Running]) -> None:
        """Add the completions of a request that has been checked; see `add`."""
        request = sequences[0].request
        self._live[request.name] = sequences
        self._scheduler.waiting.extend(sequences)
        self._prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Abort a request: its blocks are freed and the next step reports it; an unknown or ended one is ignored."""
        for sequence in self._live.get(request_id, ()):
            if sequence.finish is None:
                self._end(sequence, "abort")

    def clear(self) -> None:
        """Drop all requests and the KV cache: for a caller that was interrupted during a step.

        No deltas follow. Programs and weights stay.
        """
        self._live, self._outbox = {}, []
        self._flights.clear()
        self._scheduler.running.clear()
        self._scheduler.waiting.clear()
        if self.dead is None:
            self._restart()

    def step(self) -> list[Delta]:
        """Dispatch the next step, and read the previous one, if any.

        Returns:
            What is new; every completion gets one delta with a finish reason, whatever happens. A step that fails
            ends its own requests with `error`; others are computed again.

        """
        self._scheduler.started.clear()
        sent = self.dead is None and self._dispatch()
        if self._flights and (not sent or len(self._flights) >= DEPTH):
            self._read()
        deltas, self._outbox = self._outbox, []
        return deltas

    @property
    def started(self) -> list[str]:
        """Requests first admitted by the latest step, one name per completion."""
        return list(self._scheduler.started)

    @property
    def grammars(self) -> Any:
        """Compiler of structured output; other threads may use it before they add a request."""
        return self._intake.grammars

    def share_grammars(self, other: "Engine") -> None:
        """Share another engine's grammar compiler (same model), so that a grammar is compiled once for both."""
        self._intake.grammars = other.grammars

    def block_hashes(self, prompt: Sequence[int], adapter: str | None = None, cache_salt: str = "") -> list[bytes]:
        """Return the hashes of a prompt's first blocks; engines with the same block size give the same hashes.

        At most `NAMED` tokens are looked at, and none without a prefix cache; any thread may ask. Those of a LoRA
        adapter, and of a salt, are their own.
        """
        if not self._caching:
            return []
        before = salted(self._adapters.cache_key(adapter), cache_salt)
        return block_hashes(prompt[: min(len(prompt) - 1, NAMED)], self.sizes.block, before)

    def cached_prefix_blocks(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, are in the KV cache; safe to call from any thread.

        By the time when a request comes it may be more or fewer.
        """
        return len(self._scheduler.cached(list(names))[0])

    @property
    def busy(self) -> bool:
        """Return whether a step has work to do."""
        return bool(self._live or self._flights or self._outbox)

    def stats(self) -> EngineStats:
        """Counters and gauges; prefix queries and hits count prompt tokens."""
        scheduler, speculator = self._scheduler, self._speculator
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=scheduler.blocks.count,
            free_blocks=scheduler.blocks.free,
            prefix_queries=scheduler.queries,
            prefix_hits=scheduler.hits,
            preemptions=scheduler.preemptions,
            compiles=compiles(),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            drafts=0 if speculator is None else speculator.drafts,
            draft_tokens=0 if speculator is None else speculator.drafted,
            accepted_tokens=0 if speculator is None else speculator.accepted,
        )

    def _seat(self, sequence: Running) -> bool:
        """Have a sequence's adapter in a slot; False if all slots are used by adapters of those that run."""
        request = sequence.request
        if request.adapter is None:
            return True
        slot = self._place(request.adapter, {other.request.adapter for other in self._scheduler.running})
        request.slot = -1 if slot is None else slot
        return slot is not None

    def _place(self, name: str, used: Container[str | None]) -> int | None:
        """Return the slot of an adapter, which is put into one that no `used` adapter has; None if there is none."""
        if (found := self._adapters.place(name, used)) is None:
            return None
        slot, fresh = found
        if fresh:
            self._runner.set_adapter(slot, self._adapters.loaded[name].adapter, self._adapters.rank)
        return slot

    def _dispatch(self) -> bool:
        """Dispatch the next step; return whether there is one."""
        began = perf_counter()
        if (plan := self._scheduler.plan()) is None:
            return False
        try:
            self._flights.append(dispatch(self._runner, plan, began))
        except Exception as error:
            self._fail(plan, error)
            return False
        self._steps += 1
        return True

    def _read(self) -> None:
        flight = self._flights.popleft()
        try:
            if self._speculator is not None:
                self._speculator.observe(flight)
            for delta in collect(flight, self._leave, self._computed):
                self._generated += len(delta.token_ids)
                self._outbox.append(delta)
        except Exception as error:
            self._fail(flight.plan, error)

    def _computed(self, sequence: Running) -> None:
        self._scheduler.name(sequence, len(sequence.tokens) - 1)
        self._scheduler.forget(sequence, len(sequence.tokens) - 1)

    def _leave(self, sequence: Running) -> None:
        self._scheduler.leave(sequence)
        name = sequence.request.name
        if all(other.finish is not None for other in self._live.get(name, ())):
            self._live.pop(name, None)

    def _end(self, sequence: Running, reason: FinishReason, error: str = "") -> None:
        draft = DeltaBuilder(sequence)
        draft.end(reason, error=error)
        self._leave(sequence)
        if (delta := draft.delta()) is not None:
            self._outbox.append(delta)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Recover from a failed step: its requests end; the others start over with the tokens they have."""
        why = one_line(error)
        logger.exception("a step failed, and with it its requests: %s", why)
        plans = [plan, *(flight.plan for flight in self._flights)]
        self._flights.clear()
        for sequence in {id(s): s for plan in plans for s in plan.sequences}.values():
            sequence.steps_in_flight = sequence.pending = 0
            if sequence.finish is None:
                self._end(sequence, "error", why)
        try:
            self._restart()
        except Exception as worse:
            logger.exception("the engine has failed: its state could not be rebuilt")
            self.dead = one_line(worse)
            for sequence in [sequence for sequences in self._live.values() for sequence in sequences]:
                if sequence.finish is None:
                    self._end(sequence, "error", f"the engine has failed: {self.dead}")

    def _restart(self) -> None:
        for sequence in self._scheduler.running[::-1]:
            self._scheduler.preempt(sequence)
        self._runner.reset()
        self._scheduler = self._scheduler.anew(BlockManager(self.sizes.blocks, self._caching))
