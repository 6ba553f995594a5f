import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fullstride.llm.weights import LoadedModel, load
from tests.llm import reference

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Of HuggingFaceTB/SmolLM2-135M-Instruct's config.json.
PUBLISHED = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def loaded(smollm2) -> LoadedModel:
    return load(smollm2, dtype="float32")


@pytest.fixture(scope="module")
def parameters(loaded) -> dict[str, np.ndarray]:
    return dict(loaded.parameters.stream())


@pytest.fixture(scope="module")
def theirs(smollm2) -> transformers.LlamaForCausalLM:
    """The model as transformers itself reads it from the file."""
    config = transformers.LlamaConfig(**PUBLISHED)
    with torch.device("meta"):
        shell = transformers.LlamaForCausalLM(config)
    read = load_gguf_checkpoint(smollm2, return_tensors=True, model_to_load=shell)
    shell.load_state_dict(read["tensors"], strict=False, assign=True)
    shell.tie_weights()
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(shell.state_dict())
    return model.eval()


def test_greedy_says_paris(loaded, parameters):
    """Every token of the answer, and its end, is the most probable one after the tokens before it."""
    ids = loaded.tokenizer.encode(loaded.tokenizer.chat(QUESTION), special=False)
    answer = loaded.tokenizer.encode("The capital of France is Paris.", special=False)
    scores = reference.logits(loaded.config, parameters, ids + answer, np.float32)
    *said, end = scores[len(ids) - 1 :].argmax(-1).tolist()
    assert said == answer
    assert end in loaded.tokenizer.eos


@pytest.mark.thorough
def test_parameters_and_logits_are_those_of_transformers(loaded, parameters, theirs):
    np.testing.assert_array_equal(parameters["layers.7.k"], theirs.model.layers[7].self_attn.k_proj.weight.detach())
    np.testing.assert_array_equal(parameters["embed"], theirs.lm_head.weight.detach())
    ids = loaded.tokenizer.encode("In the year 1789, Zürich and 東京 were" + " very" * 20, special=False)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].double().numpy()
    error = np.abs(reference.logits(loaded.config, parameters, ids) - expected).max() / np.abs(expected).max()
    assert error < 1e-4
