"""LoRA adapters: rows of one batch, each with its own or none, beside transformers with merged weights in fp64."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import openai
import pytest
import transformers

from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.runner import compiles
from fullstride.llm.kernels import choose
from fullstride.llm.weights import load
from tests.llm.engine.conftest import TIGHT, Completion, finish, forget, run
from tests.llm.engine.test_engine import continued, greedy, logprobs_of, prompt
from tests.llm.lora import ATTENTION, MLP, merged, save_adapter
from tests.llm.server.conftest import connected
from tests.llm.server.real import real_server


class Adapted(NamedTuple):
    """A model of transformers, engines of it with adapters and without, and the folders of adapters and model."""

    theirs: Any
    engine: Engine
    folders: dict[str, Path]
    before: Engine
    folder: Path


SMALL: dict[str, Any] = {key: value for key, value in vars(TIGHT).items() if "lora" not in key} | {"max_sequences": 3}


@pytest.fixture(scope="module")
def adapted(compiled_soon, tiny_qwen3, tmp_path_factory) -> Adapted:
    """Two adapters of different ranks and modules, and room for a third in host memory alone."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3).eval()
    rng, root = np.random.default_rng(), tmp_path_factory.mktemp("adapters")
    patterns = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"o_proj": 9.0}}
    folders = {
        "wide": save_adapter(root / "wide", theirs, rng, rank=5, modules=ATTENTION + MLP, use_rslora=True),
        "thin": save_adapter(root / "thin", theirs, rng, rank=2, modules=("v_proj", "o_proj", "up_proj"), **patterns),
    }
    engine = Engine(
        load(tiny_qwen3), EngineConfig(**SMALL, max_loras=2, max_cpu_loras=3, max_lora_rank=6), adapters=folders
    )
    return Adapted(theirs, engine, folders, Engine(load(tiny_qwen3), EngineConfig(**SMALL)), tiny_qwen3)


def mixed(engine: Engine, ids: list[int], names: list[str | None], params: Any) -> list[Completion]:
    """One prompt with each of these adapters, all in one batch."""
    for i, name in enumerate(names):
        engine.add(str(i), ids, params, adapter=name)
    found = finish(engine)
    return [found[str(i), 0] for i in range(len(names))]


def require_merged(model: Any, ids: list[int], found: Completion) -> None:
    """Compare tokens and all logprobs with those of a merged model."""
    assert found.tokens == continued(model, ids, len(found.tokens))
    expected = logprobs_of(model, ids + found.tokens)
    told = [*found.prompt_logprobs[1:], *found.logprobs]
    own = [expected[place][token] for place, token in enumerate((ids + found.tokens)[1:])]
    np.testing.assert_allclose([place[0].logprob for place in told], own, atol=1e-3)


def test_each_row_has_the_adapter_that_it_names(adapted, seed):
    rng = np.random.default_rng(seed)
    ids, params = prompt(rng, 45), greedy(9, logprobs=0, prompt_logprobs=0)
    wide, plain, thin = mixed(adapted.engine, ids, ["wide", None, "thin"], params)
    for name, found in {"wide": wide, "thin": thin}.items():
        require_merged(merged(adapted.theirs, adapted.folders[name]), ids, found)
    assert vars(plain) == vars(run(adapted.before, *[(ids, params)] * 3)[1])


def test_blocks_are_shared_within_an_adapter_alone(adapted, seed):
    ids, engine = prompt(np.random.default_rng(seed), 40), adapted.engine
    forget(engine)
    first = mixed(engine, ids, ["wide"], greedy(3))
    again = mixed(engine, ids, ["thin", None, "wide"], greedy(3))
    assert [each.cached for each in (*first, *again)] == [0, 0, 0, 36]
    assert again[2].tokens == first[0].tokens
    names = [engine.block_hashes(ids, name) for name in (None, "wide", "thin")]
    assert len({tuple(each) for each in names}) == 3
    assert [engine.cached_prefix_blocks(each) for each in names] == [9, 9, 9]


def test_an_adapter_is_loaded_and_unloaded_without_a_compilation(adapted, tmp_path, seed):
    rng, engine = np.random.default_rng(seed), adapted.engine
    ids, made = prompt(rng, 21), {}
    for turn in range(2):
        made[turn] = save_adapter(tmp_path / str(turn), adapted.theirs, rng, rank=1 + 3 * turn, modules=("q_proj",))
        before = compiles()
        engine.load_adapter("late", made[turn])
        (found,) = mixed(engine, ids, ["late"], greedy(4, logprobs=0, prompt_logprobs=0))
        assert compiles() == before
        require_merged(merged(adapted.theirs, made[turn]), ids, found)
        engine.add("0", ids, greedy(4), adapter="late")
        with pytest.raises(ConfigError, match="adapter=late: requests with it are under way"):
            engine.unload_adapter("late")
        finish(engine)
        if not turn:
            with pytest.raises(
                ConfigError, match="max_loras=2, max_cpu_loras=3, and 3 are loaded: set a larger max_cpu"
            ):
                engine.load_adapter("more", made[0])
            with pytest.raises(ConfigError, match="adapter=late: an adapter of this name is loaded"):
                engine.load_adapter("late", made[0])
        engine.unload_adapter("late")
    assert engine.adapters == ("wide", "thin")
    with pytest.raises(ConfigError, match="adapter=late: no such adapter is loaded; those that are: wide, thin"):
        engine.add("0", ids, greedy(4), adapter="late")
    assert not engine.busy


def test_more_adapters_than_slots_take_turns(adapted, tmp_path, seed):
    rng, engine = np.random.default_rng(seed), adapted.engine
    late = save_adapter(tmp_path / "late", adapted.theirs, rng, rank=4, modules=ATTENTION)
    engine.load_adapter("late", late)
    prompts = {name: prompt(rng, 9) for name in ("wide", "thin", "late")}
    params, before = greedy(5, logprobs=0, prompt_logprobs=0), compiles()
    for turn in range(3):
        for name in (*prompts, None):
            engine.add(f"{name} {turn}", prompts[name or "late"], params, adapter=name)
    most, found = 0, {}
    while engine.busy:
        for delta in engine.step():
            found.setdefault(delta.request_id, Completion()).take(delta)
        running = {sequence.request.adapter for sequence in engine._scheduler.running} - {None}
        most = max(most, len(running))
    assert (most, compiles()) == (2, before)
    for name, folder in {**adapted.folders, "late": late}.items():
        require_merged(merged(adapted.theirs, folder), prompts[name], found[f"{name} 0"])
        assert found[f"{name} 2"].tokens == found[f"{name} 1"].tokens == found[f"{name} 0"].tokens
    assert found["None 2"].tokens == continued(adapted.theirs, prompts["late"], 5)
    engine.unload_adapter("late")


def test_clients_choose_an_adapter_as_a_model(adapted, seed):
    ids, text, engine = prompt(np.random.default_rng(seed), 21), "What is the capital?", adapted.engine
    expected = [each.tokens for each in mixed(engine, ids, [None, "wide", "thin"], greedy(5))]
    talk = engine.tokenizer.encode(engine.tokenizer.chat([{"role": "user", "content": text}]), special=False)
    (said,) = mixed(engine, talk, ["thin"], greedy(5))
    asked: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    with real_server(load(adapted.folder), engine) as live, connected(live) as client:
        assert [(each.id, each.root, each.parent) for each in cast("list[Any]", list(client.models.list()))] == [
            ("tiny", "tiny", None),
            ("wide", "wide", "tiny"),
            ("thin", "thin", "tiny"),
        ]
        with ThreadPoolExecutor() as threads:
            ask = lambda name: client.completions.create(model=name, prompt=ids, **asked)  # noqa: E731
            found = list(threads.map(ask, ["tiny", "wide", "thin"]))
        assert [each.choices[0].token_ids for each in found] == expected
        assert [each.model for each in found] == ["tiny", "wide", "thin"]
        message: list[Any] = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(model="thin", messages=message, **asked)
        assert answer.choices[0].token_ids == said.tokens
        with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has tiny, wide, thin"):
            client.completions.create(model="other", prompt=ids)


REFUSED = [
    ({"use_dora": True}, {}, "use_dora=True: adapters with it are not supported"),
    ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=\['lm_head'\]"),
    ({"peft_type": "IA3"}, {}, "peft_type=IA3: expected 'LORA'"),
    ({"bias": "all"}, {}, "bias=all: expected 'none'"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights=pissa: expected True"),
    ({"some_new_kind": 3}, {}, "some_new_kind=3: adapters with it are not supported"),
    ({"lora_alpha": "x"}, {}, "lora_alpha=x: expected a positive number"),
    ({"rank_pattern": {"(a+)+": 3}}, {}, r"rank_pattern has \(a\+\)\+: expected names of modules"),
    ({"r": 4}, {}, r"q_proj has lora_A \[2, 48\] and lora_B \[96, 2\]: expected \[4, 48\] and \[96, 4\]"),
    (
        {},
        {"base_model.model.model.embed_tokens.lora_embedding_A": (2, 5)},
        "has base_model.*embedding_A: expected only",
    ),
    ({}, {"base_model.model.lm_head.lora_A.weight": (2, 48)}, "has base_model.model.lm_head.*: expected only"),
    ({}, {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": (2, 48)}, "has .*layers.7.*: expected only"),
    ({}, {"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": (2, 48)}, "up_proj: expected both lora_A and"),
]


@pytest.mark.parametrize(("settings", "tensors", "message"), REFUSED)
def test_what_is_not_computed_is_refused(adapted, tmp_path, settings, tensors, message):
    from safetensors.numpy import load_file, save_file

    made = save_adapter(tmp_path / "a", adapted.theirs, np.random.default_rng(0), rank=2, modules=("q_proj",))
    file, config = made / "adapter_model.safetensors", made / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    save_file(load_file(file) | {name: np.ones(shape, np.float32) for name, shape in tensors.items()}, file)
    with pytest.raises(ConfigError, match=message):
        adapted.engine.load_adapter("a", made)
    assert adapted.engine.adapters == ("wide", "thin")


def test_folders_without_an_adapter_and_too_large_ranks_are_refused(adapted, tmp_path):
    with pytest.raises(ConfigError, match="no adapter_config.json: expected a folder as PEFT's save_pretrained"):
        adapted.engine.load_adapter("a", tmp_path)
    shutil.copy(adapted.folders["thin"] / "adapter_config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no adapter_model.safetensors; save the adapter with safe_serialization"):
        adapted.engine.load_adapter("a", tmp_path)
    made = save_adapter(tmp_path / "a", adapted.theirs, np.random.default_rng(0), rank=7, modules=("q_proj",))
    with pytest.raises(ConfigError, match="adapter=a: its rank is 7: expected at most max_lora_rank=6"):
        adapted.engine.load_adapter("a", made)


def test_sets_without_adapters_are_passed_over_or_refused(adapted, tiny_qwen3, caplog):
    import jax

    model, device = load(tiny_qwen3).config, jax.devices()[0]
    with caplog.at_level("INFO", "fullstride.llm.kernels"):
        assert choose("auto", model, "float32", 16, device, adapters=True).name == "plain"
    assert "chained cannot be used: it computes layers as one operation, which applies no LoRA" in caplog.text
    with pytest.raises(ConfigError, match=r"kernels=token: it computes layers as one operation"):
        choose("token", model, "float32", 16, device, adapters=True)
    with pytest.raises(ConfigError, match="adapter=a: max_loras=0, max_cpu_loras=0, and 0 are loaded: set a larger"):
        adapted.before.load_adapter("a", adapted.folders["thin"])
