import gguf
import numpy as np
import pytest
import torch
import transformers

from fullstride.llm.weights import Loaded, load
from tests.llm import reference

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def loaded(smollm2) -> Loaded:
    return load(smollm2, dtype="float32")


@pytest.fixture(scope="module")
def parameters(loaded) -> dict[str, np.ndarray]:
    return dict(loaded.parameters.stream())


@pytest.fixture(scope="module")
def theirs(smollm2):
    """transformers' own reading of the file; with it the tokenizer that it makes."""
    where = {"pretrained_model_name_or_path": smollm2.parent, "gguf_file": smollm2.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(**where)


def test_greedy_says_paris(loaded, parameters):
    ids = loaded.tokenizer.encode(loaded.tokenizer.chat(QUESTION), special=False)
    said = []
    while not said or (said[-1] not in loaded.tokenizer.eos and len(said) < 12):
        said.append(int(reference.logits(loaded.config, parameters, ids + said)[-1].argmax()))
    assert loaded.tokenizer.decode(said) == "The capital of France is Paris."


def test_logits_are_those_of_transformers(loaded, parameters, theirs):
    ids = loaded.tokenizer.encode("In the year 1789, Zürich and 東京 were" + " very" * 20, special=False)
    with torch.no_grad():
        expected = theirs[0](torch.tensor([ids])).logits[0].double().numpy()
    ours = reference.logits(loaded.config, parameters, ids)
    assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4
