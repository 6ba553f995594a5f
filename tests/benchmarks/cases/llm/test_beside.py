"""Tests of the engine's peers. A stand-in has vLLM's calls, and runs transformers on the folder that it is given."""

import json
import os
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from benchmarks.cases.llm import beside as bench_beside
from benchmarks.cases.llm import case as bench
from benchmarks.cases.llm import engine_side
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


NANO = """
import torch, transformers
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from types import SimpleNamespace

def SamplingParams(temperature, max_tokens, ignore_eos):
    assert temperature > 1e-10 and ignore_eos
    return SimpleNamespace(temperature=temperature, max_tokens=max_tokens)

class LLM:
    def __init__(self, model, max_model_len, max_num_seqs):
        assert transformers.AutoTokenizer.from_pretrained(model, use_fast=True).eos_token_id == -1
        made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.made, self.hashes = made, {"of": "a prefix"}
        self.scheduler = SimpleNamespace(block_manager=SimpleNamespace(hash_to_block_id=self.hashes))

    def generate(self, prompts, sampling, use_tqdm):
        assert not self.hashes
        self.hashes["of"] = "a prefix"
        return [{"token_ids": self.answer(p, s)} for p, s in zip(prompts, sampling, strict=True)]

    def answer(self, prompt, sampling):
        options = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0}
        options |= {"eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": sampling.max_tokens}
        return self.made.generate(torch.tensor([prompt]), **options)[0, len(prompt):].tolist()
"""


@pytest.mark.thorough
def test_nano_vllm_runs_from_a_checkout_with_the_functions_of_vllms_build(one_layer, tmp_path):
    """By the interpreter that has vLLM; what it decodes at a very low temperature is the greedy answer."""
    for folder, text in (("site/vllm", "__version__ = '0.0'"), ("checkout/nanovllm", NANO)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text(text)
    (tmp_path / "site/vllm/vllm_flash_attn.py").write_text("flash_attn_varlen_func = None")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    _, option = peers_of(f"vllm={python},nano-vllm={tmp_path}/checkout")
    work, peers = ModelWork([[5, 6], [7, 8, 9]], [GATE_TOKENS, GATE_TOKENS + 3]), Peers()
    peers.add(option, str(one_layer), "float32", "cpu", 2, work, 4)
    assert not peers.left_out
    assert (
        peers.greedy["nano-vllm"] == generate(network(model(str(one_layer), "float32"), "cpu"), [[7, 8, 9]], 20, 0.0)[0]
    )
    assert peers.flags == {"nano-vllm": "prefix cache emptied, flash attention of vLLM 0.0"}
    assert peers.versions["nano-vllm"] == "checkout checkout"


def paged(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal, softmax_scale, block_table=None, **lengths):
    """The function of vLLM's build, a sequence after the other, as far as it is used."""
    assert causal
    rows, out = len(cu_seqlens_q) - 1, torch.empty_like(q)
    for row in range(rows):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        if block_table is None:
            first, last = lengths["cu_seqlens_k"][row : row + 2].tolist()
            keys, values = k[first:last], v[first:last]
        else:
            count = int(lengths["seqused_k"][row])
            keys, values = (x[block_table[row]].flatten(0, 1)[:count] for x in (k, v))
        assert end - begin <= max_seqlen_q
        assert len(keys) <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * softmax_scale
        hidden = torch.arange(len(keys)) > torch.arange(end - begin)[:, None] + len(keys) - (end - begin)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


@pytest.fixture
def flash_attn(monkeypatch):
    """Return the two functions of `flash_attn`, made of vLLM's one."""
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.0"  # pyright: ignore
    build: Any = ModuleType("vllm.vllm_flash_attn")
    build.flash_attn_varlen_func = paged
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", build)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(engine_side, "find_spec", lambda name: name == "vllm" or None)
    assert engine_side.flash_attention() == "flash attention of vLLM 0.0"
    return sys.modules["flash_attn"]


def test_attention_of_vllms_build_has_the_arguments_of_flash_attn(flash_attn):
    """A prompt without a cache, the rest of a prompt behind its prefix, and tokens of three rows, in blocks."""
    drawn = torch.Generator().manual_seed(random.randrange(1 << 30))
    k, v = (torch.randn(9, 4, 2, 8, generator=drawn) for _ in range(2))
    q = torch.randn(11, 2, 8, generator=drawn)
    tables, lengths = torch.tensor([[3, 1, 7], [2, 5, 0], [8, 4, 6]]), [10, 6, 3]

    def expected(query, row, count):
        keys, values = (x[tables[row]].flatten(0, 1)[:count] for x in (k, v))
        return torch.einsum("hs,shd->hd", (torch.einsum("hd,shd->hs", query, keys) * 0.3).softmax(-1), values)

    same = {"softmax_scale": 0.3, "causal": True}
    cache = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "block_table": tables}
    out = flash_attn.flash_attn_with_kvcache(q[:3, None], k, v, **cache, **same)
    assert out.shape == (3, 1, 2, 8)
    torch.testing.assert_close(out[:, 0], torch.stack([expected(q[i], i, n) for i, n in enumerate(lengths)]))
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 6], [0, 10, 16]))
    rest = {"max_seqlen_q": 4, "cu_seqlens_q": starts, "max_seqlen_k": 10, "cu_seqlens_k": ends}
    out = flash_attn.flash_attn_varlen_func(q[:6], k, v, block_table=tables[:2], **rest, **same)
    wanted = [expected(q[i], 0, 7 + i) for i in range(4)] + [expected(q[4 + i], 1, 5 + i) for i in range(2)]
    torch.testing.assert_close(out, torch.stack(wanted))
    keys, values = (x[tables[0]].flatten(0, 1)[:11] for x in (k, v))
    alone = {
        "max_seqlen_q": 11,
        "cu_seqlens_q": torch.tensor([0, 11]),
        "max_seqlen_k": 11,
        "cu_seqlens_k": torch.tensor([0, 11]),
    }
    out = flash_attn.flash_attn_varlen_func(q, keys, values, block_table=None, **alone, **same)
    torch.testing.assert_close(out, torch.stack([expected(q[i], 0, i + 1) for i in range(11)]))


def test_peers_that_do_not_run_are_named(monkeypatch, tmp_path):
    (tmp_path / "nanovllm").mkdir()
    monkeypatch.setattr(bench_beside, "_run_baseline", lambda *_: SimpleNamespace(returncode=0))
    peers = Peers()
    for given in (f"nano-vllm={tmp_path}", "sglang", "vllm-tuned=/nowhere/python"):
        peers.add(*peers_of(given), "smollm2", "float32", "cpu", 1, small(100), 4)
    assert peers.left_out == [
        "nano-vllm: ImportError: neither flash_attn nor vLLM, which has a build of its functions, is installed",
        "SGLang: ModuleNotFoundError: No module named 'sglang'",
        "vLLM, tuned: /nowhere/python: no such program",
    ]
    assert not peers.times


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
