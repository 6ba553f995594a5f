"""Tests of the engine's peers. A stand-in has vLLM's calls, and runs transformers on the folder that it is given."""

import json
import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from typer.testing import CliRunner

from benchmarks.cases.llm import beside as bench_beside
from benchmarks.cases.llm import case as bench
from benchmarks.cases.llm import transformers_side as bench_transformers
from benchmarks.cases.llm.beside import Peers
from benchmarks.cases.llm.options import peers_of
from benchmarks.cases.llm.transformers_side import generate, network
from benchmarks.cases.llm.work import GATE_TOKENS, ModelWork, compared, large, model, small
from benchmarks.cli.app import app
from fullstride.errors import ConfigError
from fullstride.extras import how_to_install

VLLM = """
from types import SimpleNamespace
import sys, torch, transformers
assert not any(name.startswith("fullstride") for name in sys.modules)
__version__ = "0.0"
SamplingParams = lambda **given: SimpleNamespace(**given)

class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs, skip_tokenizer_init, enable_prefix_caching, **tuned):
        assert (skip_tokenizer_init, enable_prefix_caching) == (True, False)
        assert tuned.get("async_scheduling", True)
        self.longest, self.at_once = max_model_len, max_num_seqs
        made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.made = made

    def generate(self, prompts, sampling, use_tqdm):
        print("it talks on its output")
        return [self.answer(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling, strict=True)]

    def answer(self, prompt, sampling):
        assert sampling.ignore_eos and len(prompt) + sampling.max_tokens <= self.longest
        greedy = {"do_sample": bool(sampling.temperature), "eos_token_id": -1, "pad_token_id": 0}
        ids = self.made.generate(torch.tensor([prompt]), max_new_tokens=sampling.max_tokens - SHORT, **greedy)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids[0, len(prompt):].tolist())])
"""


@pytest.fixture
def vllm(tmp_path):
    """Return the path of an interpreter with the stand-in, which may answer with too few tokens."""

    def made(short: int = 0) -> str:
        (tmp_path / "vllm.py").write_text(VLLM.replace("SHORT", str(short)))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return made


def benched(*arguments):
    return CliRunner().invoke(app, ["llm", *map(str, arguments)])


@pytest.mark.thorough
def test_vllm_is_given_the_same_weights_and_prompts(one_layer, vllm):
    work, peers = ModelWork([[5, 6], [7, 8, 9]], [GATE_TOKENS, GATE_TOKENS + 3]), Peers()
    peers.add_vllm(vllm(), str(one_layer), "float32", 2, work, 4)
    assert [len(samples) for samples in peers.times.values()] == [3]
    assert (
        peers.greedy["vLLM"]
        == generate(network(model(str(one_layer), "float32"), "cpu"), [[7, 8, 9]], GATE_TOKENS, 0.0)[0]
    )
    assert peers.versions["vllm"] == "0.0"


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize("workload", ["small", "large"])
def test_vllm_runs_by_its_own_interpreter_on_the_same_weights(workload, one_layer, vllm, tmp_path, monkeypatch):
    draw = random.Random(5)
    few = [[draw.randrange(3, 200) for _ in range(length)] for length in (30, 11)]
    monkeypatch.setattr(bench, "large", lambda *_: ModelWork(few, [22, 25]))
    more = ["--no-baseline"] if workload == "small" else ["--sequences", "2"]
    result = benched(
        "--model", one_layer, "--workload", workload, "--vllm", vllm(), "--out", tmp_path / "out", "--runs", 2, *more
    )
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "out").glob("llm--*beside-vllm*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["fullstride", "vLLM"]
    assert len(found["rows"][1]["timing"]["samples_ms"]) == 2
    assert found["gate"]["greedy tokens that differ from vLLM, of 20"] == 0
    assert found["environment"]["versions"]["vllm"] == "0.0"
    assert "left_out" not in found["conditions"]


@pytest.mark.thorough
def test_vllm_that_answers_with_too_few_tokens_is_an_error(tiny_qwen3, vllm, capfd):
    peers = Peers()
    with pytest.raises(ConfigError, match="it ended with exit code 1"):
        peers.add_vllm(vllm(short=1), str(tiny_qwen3), "float32", 1, ModelWork([[5, 6], [7]], [3, 3]), 4)
    assert not peers.times
    assert "vLLM: answers of [2, 2] tokens, expected [3, 3]" in capfd.readouterr().err


def test_weights_that_cannot_be_written_are_an_error(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_beside, "_run_baseline", lambda *_: SimpleNamespace(returncode=1))
    with pytest.raises(ConfigError, match=r"its weights were not written \(exit code 1\)"):
        Peers().add_vllm(vllm(), str(tmp_path / "nowhere"), "float32", 1, small(100), 4)


@pytest.mark.parametrize(
    ("python", "workload", "message"),
    [
        ("/nowhere/python", "large", "no such program; expected the Python of an environment that has vLLM"),
        (sys.executable, "large", "it has no vLLM"),
        (sys.executable, "sweep", "--vllm with --workload sweep: only small and large have this option"),
    ],
)
def test_an_interpreter_without_vllm_is_refused(python, workload, message, tmp_path):
    result = benched("--workload", workload, "--vllm", python, "--out", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not os.listdir(tmp_path)


def test_an_interpreter_is_told_from_any_folder_and_stays_a_link(vllm, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(vllm())
    monkeypatch.chdir(tmp_path)
    assert bench_beside.interpreter("./link") == str(tmp_path / "link")


def test_packages_that_it_needs_are_named(monkeypatch, capfd):
    monkeypatch.setattr(bench_beside, "find_spec", lambda name: None)
    peers = Peers()
    peers.add_transformers("smollm2", "float32", "cpu", 1, "sdpa")
    lacking = "without torch and transformers"
    with pytest.raises(ConfigError, match=f"--vllm python: {lacking}.*write its weights; "):
        peers.add_vllm("python", "smollm2", "float32", 1, small(100), 4)
    assert peers.conditions == {"left_out": f"transformers: {lacking}"}
    said = "".join(capfd.readouterr())
    assert f"left out: transformers: {lacking}; {how_to_install('torch')} transformers, or use" in said
    assert "Traceback" not in said


def test_peers_that_do_not_run_are_named(monkeypatch, tmp_path):
    (tmp_path / "nanovllm").mkdir()
    monkeypatch.setattr(bench_beside, "_run_baseline", lambda *_: SimpleNamespace(returncode=0))
    peers = Peers()
    for given in (f"nano-vllm={tmp_path}", "sglang", "vllm-tuned=/nowhere/python"):
        (option,) = peers_of(given)
        peers.add(option, "smollm2", "float32", "cpu", 1, small(100), 4)
    assert peers.left_out == [
        "nano-vllm: ImportError: neither flash_attn nor vLLM, which has a build of its functions, is installed",
        "SGLang: ModuleNotFoundError: No module named 'sglang'",
        "vLLM, tuned: /nowhere/python: no such program",
    ]
    assert not peers.times


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_soon")
def test_peers_stand_in_the_table_whether_they_run_or_not(one_layer, tmp_path):
    result = benched(
        "--model", one_layer, "--beside", "transformers,transformers-static,sglang", "--runs", 1, "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.glob("llm--*--beside-transformers-transformers-static-sglang--*.json")
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["fullstride", "transformers, one by one", "transformers, batched"]
    assert [row["extra"].get("flags") for row in found["rows"]] == [None, "attention sdpa", "attention sdpa"]
    for name, why in (
        ("SGLang", "ModuleNotFoundError: No module named 'sglang'"),
        ("transformers, batched and compiled", "transformers compiles nothing on a CPU"),
    ):
        assert f"{name}: not run: {why}" in " ".join(result.output.split())
        assert f"{name}: {why}" in found["conditions"]["left_out"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gpt", "--beside=gpt: expected one of"),
        ("nano-vllm", "expected the path of a checkout, with the folder nanovllm"),
        ("transformers=x", "expected no path"),
    ],
)
def test_peers_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        peers_of(given)


def test_beside_replaces_the_options_for_one_peer(tmp_path):
    for more, message in (
        (["--no-baseline"], "expected one of the two"),
        (["--workload", "large"], "only small has it"),
    ):
        result = benched("--beside", "transformers-static", *more, "--out", tmp_path)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


def test_a_cache_of_fixed_size_serves_run_after_run(tiny_qwen3):
    made = network(model(str(tiny_qwen3), "float32"), "cpu")
    work = small(made.config.vocab_size)
    cache = transformers.StaticCache(config=made.config, max_cache_len=work.longest)
    wanted = generate(made, work.prompts, 100, 0.0)
    assert len({token for answer in wanted for token in answer}) > 2
    for _ in range(2):
        assert generate(made, work.prompts, 100, 0.0, cache) == wanted


def test_it_is_compiled_on_a_gpu_and_what_fails_there_costs_no_others_times(tiny_qwen3, monkeypatch):
    ran = []
    monkeypatch.setattr(bench_transformers, "network", lambda *_, made=network: made(*_[:1], "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("synchronize"))
    monkeypatch.setattr(bench_transformers, "small", lambda vocab: ModelWork([[7], [5, 6]], [24, 24]))
    found = bench_transformers.times(str(tiny_qwen3), "float32", "cuda", 2, "sdpa")
    assert {name: len(ms) for name, ms in found["ms"].items()} == dict.fromkeys(
        ("transformers, one by one", "transformers, batched", "transformers, batched and compiled"), 3
    )
    assert len(ran) == 9
    tokens = found["greedy"]["transformers"]
    assert len(tokens) == GATE_TOKENS
    assert found["greedy"] == dict.fromkeys(("transformers", "transformers, batched and compiled"), tokens)

    def fails(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(bench_transformers, "compiled", fails)
    found = bench_transformers.times(str(tiny_qwen3), "float32", "cuda", 1, "sdpa")
    assert list(found["ms"]) == ["transformers, one by one", "transformers, batched"]
    assert found["left_out"] == {"transformers, batched and compiled": "RuntimeError: no compiler"}


def test_what_did_not_compile_is_told_and_kept(monkeypatch):
    found = {"attention": "sdpa", "greedy": {"x": [1]}, "ms": {"x": [1.0]}, "left_out": {"y": "why"}, "versions": {}}
    found["flags"] = {"x": "attention sdpa"}
    done = SimpleNamespace(returncode=0, stdout=json.dumps(found))
    monkeypatch.setattr(bench_beside, "_run_baseline", lambda *_: done)
    peers = Peers()
    peers.add_transformers("smollm2", "float32", "cuda", 1, "sdpa")
    assert peers.conditions == {"baseline_attention": "sdpa", "left_out": "y: why"}
    assert peers.times == {"x": [1.0]}


def test_what_is_compared_fits_into_the_largest_workloads_tables():
    work = large(151_936, 256)
    gate = compared(work)
    assert gate.longest == 56 <= work.longest
    assert gate.prompts == [work.prompts[-1][:36]]
