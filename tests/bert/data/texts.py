"""Texts and a tokenizer that are made here: words of random syllables, in sentences."""

import functools

import numpy as np
from tokenizers import Tokenizer

from fullstride.bert.data.corpus import Corpus
from fullstride.bert.data.tokenizer import trained

SYLLABLES = ["ba", "de", "ki", "lo", "mu", "ra", "si", "te", "vo", "nu"]


@functools.cache
def corpus(count: int = 60, seed: int = 0, longest: int = 40) -> Corpus:
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(SYLLABLES, rng.integers(1, 5))) for _ in range(80)]
    entries = [" ".join(rng.choice(words, rng.integers(1, longest))) + f" {i}." for i in range(count)]
    return Corpus("made", tuple(entries))


@functools.cache
def tokenizer() -> Tokenizer:
    return trained(list(corpus().entries), 90)
