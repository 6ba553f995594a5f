import json
import shutil

import gguf
import pytest

from fullstride.assets.model_folder import read_json
from fullstride.errors import ConfigError
from fullstride.llm import LLM, SamplingParams
from fullstride.llm.weights import load, settings
from fullstride.llm.weights.gguf_file import open_gguf

QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1}


def load_sampling(folder):
    file = folder / "generation_config.json"
    return settings.checked_sampling(file, read_json(file))


def _said(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_a_folder_says_how_its_tokens_are_chosen(tiny_llama, tmp_path):
    said = {**QWEN3, "min_p": None, "do_sample": True, "max_new_tokens": 2048, "bos_token_id": 1}
    folder = _said(shutil.copytree(tiny_llama, tmp_path / "model"), **said)
    assert load(folder).sampling == QWEN3
    assert load_sampling(tmp_path) == {}


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 2.0}, {"min_p": "0.1"}])
def test_what_cannot_be_is_refused_by_its_file(tmp_path, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name}={value!r}: expected"):
        load_sampling(_said(tmp_path, **wrong))


def test_a_gguf_says_so_in_float32(tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_float32("general.sampling.penalty_repeat", 1.1)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.xtc_threshold", 0.2)  # which the engine does not have
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    found = settings.gguf_sampling(path, open_gguf(path).metadata)
    assert found == {"temperature": 0.6, "repetition_penalty": 1.1, "top_k": 20}


@pytest.mark.usefixtures("compiled_soon")
def test_python_takes_it_where_no_parameters_are_given(tiny_llama, tmp_path):
    folder = _said(shutil.copytree(tiny_llama, tmp_path / "model"), top_k=1, temperature=0.5)
    llm = LLM(folder, max_sequences=1, max_tokens_per_step=32, block_size=8)
    assert llm.get_default_sampling_params() == SamplingParams(top_k=1, temperature=0.5)
    greedy = llm.generate("The quick", SamplingParams(temperature=0.0))[0].outputs[0].token_ids
    free = [llm.generate("The quick", SamplingParams(seed=n))[0].outputs[0].token_ids for n in range(3)]
    assert llm.generate("The quick")[0].outputs[0].token_ids == greedy
    assert [token for delta in llm.stream("The quick") for token in delta.token_ids] == greedy
    assert any(tokens != greedy for tokens in free)
