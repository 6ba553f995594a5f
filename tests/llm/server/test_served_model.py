import logging
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server import launch as serving
from fullstride.llm.server.errors import BadRequestError, NotFoundError
from fullstride.llm.server.sampling import sampling_params
from fullstride.llm.server.schemas.base import SamplingRequest
from fullstride.llm.server.served_model import ServedModel
from tests.llm.server.fake_tokenizer import FakeTokenizer


class Watched(FakeTokenizer):
    """Notes what it encodes."""

    def __init__(self):
        self.encoded: list[str] = []

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.encoded.append(text)
        return super().encode(text, special)


def test_texts_that_no_tokens_could_shorten_enough_are_not_encoded():
    tokenizer = Watched()
    served = ServedModel(("m",), tokenizer, 10)
    assert served.longest_token == len("<assistant>")
    with pytest.raises(BadRequestError, match="more than 10"):
        served.encode("x" * (10 * served.longest_token + 1), "prompt", special=False)
    assert tokenizer.encoded == []
    with pytest.raises(BadRequestError, match="10 \\+ 1"):
        served.fitting(served.encode("x" * 10, "prompt", special=False), "prompt")


def test_names():
    served = ServedModel(("a", "b"), FakeTokenizer(), 10)
    assert (served.name(None), served.name("b")) == ("a", "b")
    with pytest.raises(NotFoundError, match="has a, b"):
        served.name("c")


def test_what_a_request_leaves_out_is_as_the_model_suggests():
    served = ServedModel(("m",), FakeTokenizer(), 10, {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    request = SamplingRequest.model_validate({"temperature": 0, "top_k": -1, "top_p": 0.5})
    found = sampling_params(request, served, max_tokens=4, logprobs=None)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0, -1, 0.5, 1.1)
    plain = sampling_params(
        SamplingRequest.model_validate({}), ServedModel(("m",), FakeTokenizer(), 10), max_tokens=4, logprobs=None
    )
    assert plain == SamplingParams(max_tokens=4, stop=(), stop_token_ids=[], logit_bias={})


@pytest.mark.parametrize(("asked", "kept"), [("auto", {"top_k": 3}), ("none", {})])
def test_whose_defaults_are_served(monkeypatch, caplog, asked, kept):
    engine = SimpleNamespace(sizes=SimpleNamespace(max_length=8, rows=1), grammars=None)
    kind = make_dataclass("Loaded", ["config", "tokenizer", "sampling"])
    loaded, made = kind(None, FakeTokenizer(), {"top_k": 3}), []
    monkeypatch.setattr(serving, "load_for_engine", lambda *_: loaded)
    monkeypatch.setattr(serving, "check_devices", lambda *_: None)
    monkeypatch.setattr(serving, "replicated", lambda *_: [engine])
    monkeypatch.setattr(serving, "create_app", lambda engines, served, **_: made.append(served))
    monkeypatch.setattr(serving, "run", lambda *_, **__: None)
    with caplog.at_level(logging.INFO):
        serving.serve("m", port=0, generation_config=asked)
    assert made[0].sampling == kept
    assert ("top_k=3" in caplog.text) == bool(kept)


def test_other_places_of_defaults_are_refused():
    with pytest.raises(ConfigError, match="--generation-config=some.json: expected one of"):
        serving.serve("m", generation_config="some.json")
    with pytest.raises(ConfigError, match="--tool-parser=some: expected one of .*auto"):
        serving.serve("m", tool_parser="some")
