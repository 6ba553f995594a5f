"""An engine whose every completion is known beforehand: same interface, a pool of blocks, no model."""

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fullstride.errors import ConfigError
from fullstride.llm.outputs import Delta, EngineStats, Logprob
from fullstride.llm.sampling_params import SamplingParams
from tests.llm.server.fake_tokenizer import END

# Bytes that no text has: a prompt with one makes the engine fail in `add`, for that request alone, or in `step`.
FAIL_ADD, FAIL_REQUEST, FAIL_STEP = 255, 254, 253
Script = Callable[[Sequence[int], SamplingParams, int], Sequence[int]]


def repeat_prompt(prompt: Sequence[int], params: SamplingParams, index: int) -> list[int]:
    """The prompt's own bytes, then the end."""
    return [token for token in prompt if token < END]


def place(token: int, count: int) -> tuple[Logprob, ...]:
    """The chosen token, then the most probable ones, of which it is the first."""
    return Logprob(token, -0.5, 1), *(Logprob((token + i) % 256, -0.5 - i, 1 + i) for i in range(count))


@dataclass
class Running:
    """One completion."""

    request_id: str
    index: int
    prompt: Sequence[int]
    params: SamplingParams
    script: list[int]
    blocks: int
    most: int
    pooling: str | None = None
    made: int = 0
    text: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))


class FakeEngine:
    """Reserves all blocks of a sequence when it starts, so that nothing is ever preempted."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 16,
        max_sequences: int = 8,
        max_length: int = 512,
        delay: float = 0.0,
        script: Script = repeat_prompt,
    ):
        self.blocks = self.free = blocks
        self.block_size, self.max_sequences, self.max_length = block_size, max_sequences, max_length
        self.delay, self.script = delay, script
        self.dead: str | None = None
        self.started: list[str] = []
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.adapters: list[str | None] = []
        self.salts: list[str] = []
        self.steps = self.generated = self.prompt_tokens = 0

    def add(self, request_id, prompt, params, *, arrived=None, adapter=None, pooling=None, cache_salt=""):
        assert request_id not in {sequence.request_id for sequence in self.waiting + self.running}
        if FAIL_ADD in prompt:
            raise RuntimeError("told to fail in add")
        most = params.max_tokens or self.max_length - len(prompt)
        blocks = -(-(len(prompt) + most) // self.block_size)
        if blocks > self.blocks or len(prompt) + most > self.max_length:
            raise ConfigError(f"{len(prompt)} + {most} tokens never fit into {self.blocks} blocks: ask for less")
        self.params.append(params)
        self.adapters.append(adapter)
        self.salts.append(cache_salt)
        self.prompts.append(list(prompt))
        self.prompt_tokens += len(prompt)
        for index in range(params.n):
            script = [*self.script(prompt, params, index), END]
            self.waiting.append(Running(request_id, index, prompt, params, script, blocks, most, pooling))

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.waiting = [each for each in self.waiting if each.request_id != request_id]
        for sequence in [each for each in self.running if each.request_id == request_id]:
            self._leave(sequence)

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def step(self):
        time.sleep(self.delay)
        self.steps += 1
        self.started = []
        while self.waiting and len(self.running) < self.max_sequences and self.waiting[0].blocks <= self.free:
            sequence = self.waiting.pop(0)
            self.free -= sequence.blocks
            self.running.append(sequence)
            self.started.append(sequence.request_id)
        return [self._token(sequence) for sequence in list(self.running)]

    def _token(self, sequence):
        if FAIL_STEP in sequence.prompt:
            raise RuntimeError("told to fail in step")
        if FAIL_REQUEST in sequence.prompt:
            self._leave(sequence)
            return Delta(sequence.request_id, sequence.index, finish_reason="error", error="told to fail")
        token = sequence.script[sequence.made % len(sequence.script)]
        sequence.made += 1
        self.generated += 1
        text, reason, stop = self._text(sequence, token)
        if reason is not None:
            self._leave(sequence)
        return Delta(
            sequence.request_id,
            sequence.index,
            token_ids=(token,),
            text=text,
            logprobs=self._logprobs(token, sequence.params.logprobs),
            prompt_logprobs=self._prompt_logprobs(sequence),
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=len(sequence.prompt) // 2,
            embedding=np.arange(1.0, 5.0) if sequence.pooling and reason else None,
        )

    def _text(self, sequence, token):
        params = sequence.params
        if token == END and not params.ignore_eos:
            return sequence.decoder.decode(b"", final=True), "stop", None
        piece = sequence.decoder.decode(bytes([token])) if token < END else ""
        sequence.text += piece
        for stop in params.stop or ():
            if sequence.text.endswith(stop):  # only stop texts of one character, so that none is sent in part
                return "", "stop", stop
        if token in (params.stop_token_ids or ()):
            return "", "stop", token
        return piece, "length" if sequence.made == sequence.most else None, None

    def _logprobs(self, token, count):
        return None if count is None else (place(token, count),)

    def _prompt_logprobs(self, sequence):
        count = sequence.params.prompt_logprobs
        if count is None or sequence.made > 1 or sequence.index > 0:
            return None
        return (None, *(place(token, count) for token in sequence.prompt[1:]))

    def _leave(self, sequence):
        self.running.remove(sequence)
        self.free += sequence.blocks

    def block_hashes(self, prompt, adapter=None, cache_salt="") -> list[bytes]:
        return []

    def cached_prefix_blocks(self, names) -> int:
        return 0

    def stats(self):
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks=self.blocks,
            free_blocks=self.free,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
        )
