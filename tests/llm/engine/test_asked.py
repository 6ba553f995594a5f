"""Sampling needs of rows, from the host's numbers and from the device's arrays."""

import random
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from fullstride.llm.engine.dispatch import COLDEST, params, sampling_needs
from fullstride.llm.engine.sequence import Request, Sequence, StopTextBuffer
from fullstride.llm.engine.state import EngineState, sampler
from fullstride.llm.kernels.interface import needs_full_sampler
from fullstride.llm.sampling_params import SamplingParams

CHOICES = {
    "temperature": [0.0, COLDEST / 2, COLDEST, 0.7, 1e30],
    "top_k": [0, -1, 1, 2**40],
    "top_p": [1.0, 0.999, 0.01, 1e-40],
    "min_p": [0.0, 1e-3, 1.0],
    "repetition_penalty": [1.0, 1.2],
    "presence_penalty": [0.0, -0.5],
    "frequency_penalty": [0.0, 0.5],
    "logit_bias": [None, {}, {5: 2.0}],
    "min_tokens": [0, 3],
    "logprobs": [None, 0, 4],
}


def sequences(count: int) -> list[Sequence]:
    """Most settings are left alone, so that each counts by itself somewhere."""
    draw, found = random.Random(), []
    for _ in range(count):
        given = {name: draw.choice(values if draw.random() < 0.25 else values[:1]) for name, values in CHOICES.items()}
        request = Request("", [3, 4], SamplingParams(**given), 30, (1,))
        matcher = SimpleNamespace() if draw.random() < 0.1 else None
        found.append(Sequence(request, 0, [3, 4], (1, 2), StopTextBuffer(None), matcher))
    return found


def test_the_host_and_the_device_agree_about_which_rows_ask():
    rows = sequences(500)
    words, nothing = jnp.asarray(np.stack([params(row) for row in rows])), jnp.zeros(1)
    state = EngineState(nothing, nothing, nothing, nothing, words, nothing, nothing, nothing, nothing)
    slots = jnp.arange(len(rows))
    found = np.asarray(needs_full_sampler(sampler(state, slots, slots))).tolist()
    assert [bool(needs_full_sampler(sampling_needs(row))) for row in rows] == found
    assert 50 < sum(found) < 450
