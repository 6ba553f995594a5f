"""Tests of the script for other engines: nano-vllm from a checkout, and the functions that it calls."""

import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.cases.llm import engine_side
from benchmarks.cases.llm.beside import Peers
from benchmarks.cases.llm.options import peers_of
from benchmarks.cases.llm.transformers_side import generate, network
from benchmarks.cases.llm.work import GATE_TOKENS, ModelWork, model

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
