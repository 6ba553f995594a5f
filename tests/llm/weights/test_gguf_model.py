import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
import transformers

from fullstride.errors import ConfigError
from fullstride.llm.config import LinearRope, LongRope, YarnRope
from fullstride.llm.weights import load
from fullstride.llm.weights.gguf_file import open_gguf
from fullstride.llm.weights.gguf_model import read_config
from tests.llm import tiny
from tests.llm.gguf_files import write_gguf

# Llama 3's own original length: a GGUF does not say another.
LLAMA3 = {"rope_parameters": {**tiny.LLAMA["rope_parameters"], "original_max_position_embeddings": 8192}}
TURNS = {"beta_fast": 24.0, "beta_slow": 1.5}
KINDS = {
    "qwen3": ("qwen3", tiny.QWEN3),
    "llama": ("llama", LLAMA3),
    "qwen2": ("qwen2", {}),
    "linear": ("llama", tiny.LINEAR),
    "yarn": ("qwen3", tiny.YARN),
    "yarn of other turns": ("qwen3", {"rope_parameters": {**tiny.YARN["rope_parameters"], **TURNS}}),
}
# As far as a GGUF can say it: what is not in it llama.cpp takes from the family.
KINDS |= {
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "granite": ("granite", tiny.FAMILIES["granite"]),
    "phi3": ("phi3", tiny.FAMILIES["phi3"]),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", tiny.FAMILIES["gemma2"] | {"query_pre_attn_scalar": 14}),
    "gemma3": (
        "gemma3_text",
        tiny.FAMILIES["gemma3_text"]
        | {"query_pre_attn_scalar": 14, "num_hidden_layers": 7, "sliding_window_pattern": 6},
    ),
    "qwen3_moe": ("qwen3_moe", tiny.FAMILIES["qwen3_moe"]),
    "mixtral": ("mixtral", tiny.FAMILIES["mixtral"] | {"sliding_window": None}),
    "gpt_oss": ("gpt_oss", tiny.FAMILIES["gpt_oss"] | {"swiglu_limit": 7.0}),
}
# Rows that are whole blocks.
BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture(params=KINDS)
def both(request, tiny_model, tmp_path):
    """One random model, as a folder and as a GGUF file."""
    kind, settings = KINDS[request.param]
    folder = tiny_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return load(folder), load(write_gguf(tmp_path / "model.gguf", model))


def test_a_gguf_is_the_folder_that_it_was_made_from(both):
    folder, file = both
    scaling = file.config.rope_scaling
    if isinstance(scaling, LongRope):  # whose magnitude a GGUF has in fp32
        assert scaling.magnitude == pytest.approx(folder.config.rope_scaling.magnitude, rel=1e-7)
        scaling = folder.config.rope_scaling
    assert replace(file.config, rope_scaling=scaling) == replace(folder.config, eos=(2, 0))
    for name, value in folder.parameters.items():
        # A norm's weight that the file has one more of is rounded once.
        shift = 2e-7 if folder.config.norm_offset and "norm" in name else 0
        np.testing.assert_allclose(file.parameters[name], value, rtol=0, atol=shift, err_msg=name)


def test_a_gguf_carries_the_tokenizer_and_the_template(both):
    folder, file = (loaded.tokenizer for loaded in both)
    text = "The dog's 12 naïve 東京 👩‍🚀\n\n  x"
    assert file.encode(text) == folder.encode(text)
    assert file.decode(file.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    assert file.chat(messages) == folder.chat(messages)
    assert file.vocab_size == folder.vocab_size == 344


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_parts_of_parameters_are_parts_of_the_whole(kind, tmp_path, seed):
    model = tiny.make_model("llama", seed, **BLOCKS)
    loaded = load(write_gguf(tmp_path / "model.gguf", model, kind), dtype="float32")
    rng = np.random.default_rng(seed)
    for name in ("layers.1.q", "layers.0.down", "layers.0.gate", "norm"):
        whole = loaded.parameters[name]
        rows, columns = (slice(*sorted(rng.integers(0, size + 1, 2))) for size in (*whole.shape, 1)[:2])
        part = loaded.parameters.read(name, rows=rows)
        np.testing.assert_array_equal(part, whole[rows])
        if whole.ndim == 2:
            np.testing.assert_array_equal(loaded.parameters.read(name, rows, columns), whole[rows, columns])
    exact = model.state_dict()["model.layers.1.self_attn.q_proj.weight"].numpy()
    assert np.abs(loaded.parameters["layers.1.q"] - exact).max() < (0.02 if kind in ("F16", "BF16", "Q8_0") else 0.25)


def test_packed_numbers_come_as_bfloat16_and_plain_ones_as_they_are(tmp_path):
    model = tiny.make_model("qwen3", 0, **BLOCKS)
    for kind, dtype in {"Q8_0": "bfloat16", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}.items():
        loaded = load(write_gguf(tmp_path / f"{kind}.gguf", model, kind))
        assert {value.dtype.name for value in loaded.parameters.values()} == {loaded.config.dtype} == {dtype}


def _with(path, tensors=(), **overrides):
    """A GGUF of metadata alone, but for an embedding and these vectors of two ones."""
    writer = gguf.GGUFWriter(path, overrides.pop("arch", "llama"))
    numbers = {"block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8}
    for key, value in ({f"llama.{name}": size for name, size in numbers.items()} | overrides).items():
        {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)](
            key, value
        )
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    for name in tensors:
        writer.add_tensor(name, np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SMALL = {"llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5}
MIXED = SMALL | {"llama.expert_count": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"arch": "gemma4"}, "general.architecture=gemma4: expected one of .*llama, qwen2, qwen3"),
        ({}, "llama.attention.head_count=None: expected a positive whole number"),
        ({"llama.attention.head_count": True}, "llama.attention.head_count=True: expected a positive whole number"),
        ({"llama.attention.head_count": 2}, "llama.attention.layer_norm_rms_epsilon=None: expected a positive number"),
        ({"llama.attention.head_count": 2, "llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type=longrope"),
        ({"llama.attention.head_count": 2, "llama.rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor=0.5"),
        (
            {"llama.attention.head_count": 2, "llama.rope.scaling.type": "yarn"},
            "llama.rope.scaling.factor=None: expected",
        ),
        ({"llama.attention.head_count": 2, "llama.expert_shared_count": 1}, "llama.expert_shared_count=1"),
        ({"llama.attention.head_count": 2, "llama.logit_scale": 2.0}, "llama.logit_scale=2.0: models with it are not"),
        (MIXED | {"llama.expert_used_count": 3}, "expert_used_count=3: expected at most 2, the experts"),
        (MIXED | {"llama.expert_used_count": 2}, "2 experts are configured, but blk.0.ffn_gate_exps.weight is of 0"),
        ({"llama.attention.head_count": 2, "llama.rope.dimension_count": 2}, "rope.dimension_count=2"),
        ({"llama.attention.head_count": 2, "split.count": 3}, "one part of a split model"),
        ({"split.count": "x"}, "split.count=x: expected a whole number"),
        ({"split.count": True}, "split.count=True: expected a whole number"),
        ({"arch": "two\nlines"}, "general.architecture=two lines: expected one of"),
        (
            {"llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5},
            "missing: norm, layers.0.attn_norm.* and 5 more",
        ),
    ],
)
def test_what_is_not_run_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(_with(tmp_path / "model.gguf", **overrides))
    assert "\n" not in str(caught.value)


SCALED = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "scaling", "reach"),
    [
        # llama.cpp takes a factor without a type as linear, and knows the key of its first converters.
        ({"llama.rope.scaling.factor": 4.0}, LinearRope(4.0), 32),
        ({"llama.rope.scale_linear": 4.0}, LinearRope(4.0), 32),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 2.5}, LinearRope(2.5), 20),
        ({"llama.rope.scale_linear": 4.0, "llama.rope.scaling.factor": 2.0}, LinearRope(2.0), 16),
        ({"llama.rope.scale_linear": 4.0, "llama.rope.scaling.factor": 1.0}, None, 8),
        ({"llama.rope.scale_linear": 1.0}, None, 8),
        ({"llama.rope.scaling.factor": 0.0}, None, 8),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}, None, 8),
        # Without an original length it is the model's own.
        (SCALED, YarnRope(4.0, 8, 32.0, 1.0, 0.1 * math.log(4) + 1), 32),
    ],
)
def test_what_a_gguf_says_of_its_rope(tmp_path, metadata, scaling, reach):
    config = read_config(open_gguf(_with(tmp_path / "model.gguf", **SMALL, **metadata)))
    assert (config.rope_scaling, config.max_position) == (scaling, reach)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
            (),
            "llama.rope.scaling.factor=4.0 beside rope.scaling.type=none: expected no factor, or another type",
        ),
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scale_linear": 4.0},
            (),
            "llama.rope.scale_linear=4.0 beside rope.scaling.type=none",
        ),
        ({"llama.rope.scaling.factor": -4.0}, (), "llama.rope.scaling.factor=-4.0: expected a positive number"),
        (SCALED, ("rope_freqs.weight",), "rope_freqs.weight beside yarn RoPE: expected one of them"),
        ({"llama.rope.scale_linear": 4.0}, ("rope_freqs.weight",), "rope_freqs.weight beside linear RoPE"),
    ],
)
def test_ropes_that_contradict_themselves_are_refused(tmp_path, metadata, tensors, message):
    with pytest.raises(ConfigError, match=message):
        read_config(open_gguf(_with(tmp_path / "model.gguf", tensors, **SMALL, **metadata)))


def test_other_scaled_ropes_are_refused(tmp_path):
    model = tiny.make_model("llama", 0, **tiny.LLAMA)
    with pytest.raises(ConfigError, match="rope_freqs.weight are not Llama 3's"):
        load(write_gguf(tmp_path / "model.gguf", model))
