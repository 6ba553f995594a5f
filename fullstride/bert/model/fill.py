"""Predictions of a model for [MASK] in a text."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from fullstride.bert.data.tokenizer import specials_of
from fullstride.bert.model.bert import Bert
from fullstride.errors import ConfigError


@dataclass(frozen=True)
class Candidate:
    """One token for one place.

    Attributes:
        token: the token's text, with `##` if it continues a word.
        probability: the model's probability, with the other places hidden, too.
        text: the whole text with this token, the other places unchanged.

    """

    token: str
    probability: float
    text: str


def fill(model: Bert, tokenizer: Tokenizer, text: str, top: int = 5) -> list[list[Candidate]]:
    """The likeliest tokens for each [MASK] of a text (RoBERTa's is <mask>), the likeliest first.

    Raises:
        ConfigError: if there is no [MASK], the text is too long, or the model has no head.

    """
    ids, mask = tokenizer.encode(text).ids, specials_of(tokenizer)[-1]
    places = [i for i, token in enumerate(ids) if token == tokenizer.token_to_id(mask)]
    if not places:
        raise ConfigError(
            f"text={text!r}: no {mask} in it; expected one or more, as in 'Paris is the {mask} of France.'"
        )
    probabilities = np.asarray(_probabilities(model, jnp.asarray([ids]), jnp.asarray(places)))
    return [
        [_candidate(tokenizer, ids, place, int(token), float(row[token])) for token in np.argsort(-row)[:top]]
        for place, row in zip(places, probabilities, strict=True)
    ]


@eqx.filter_jit
def _probabilities(model: Bert, ids: jax.Array, places: jax.Array) -> jax.Array:
    return jax.nn.softmax(model.logits(model(ids)[0, places]), axis=-1)


def _candidate(tokenizer: Tokenizer, ids: list[int], place: int, token: int, probability: float) -> Candidate:
    inner = [*ids[1:place], token, *ids[place + 1 : -1]]
    return Candidate(
        tokenizer.id_to_token(token) or "", probability, tokenizer.decode(inner, skip_special_tokens=False)
    )
