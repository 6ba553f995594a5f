import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fullstride.llm.server.engine_metrics import PREFIX
from fullstride.llm.server.metrics import VLLM, Metrics
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server, until

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "server-metrics.md"


def _samples(http: httpx.Client) -> dict[str, float]:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = ",".join(f"{key}={value}" for key, value in sample.labels.items() if key != "le")
        found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_what_prometheus_reads():
    with fake_server(FakeEngine(blocks=32, delay=0.01)) as live, httpx.Client(base_url=live.url) as http:
        for prompt in ("abcd", "abcdef"):
            http.post("/v1/completions", json={"prompt": prompt, "n": 2})
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        http.post("/v1/completions", json={"prompt": "abc", "nonsense": 2})
        until(lambda: live.bridge.stats.running == 0)
        found = _samples(http)
    expected = {
        "requests_accepted_total{}": 3,
        "requests_ended_total{outcome=finished}": 3,
        "completions_finished_total{reason=stop}": 4,
        "completions_finished_total{reason=length}": 1,
        "http_responses_total{route=/v1/completions,status=200}": 3,
        "requests_refused_total{reason=unknown_parameter}": 1,
        "http_responses_total{route=/v1/completions,status=400}": 1,
        "queue_seconds_count{}": 3,
        "time_to_first_token_seconds_count{}": 3,
        "request_seconds_count{}": 3,
        "inter_token_seconds_count{}": 2 * 4 + 2 * 6 + 1,
        "generated_tokens_total{}": 2 * 5 + 2 * 7 + 2,
        "prompt_tokens_total{}": 5 + 7 + 4,
        "requests_running{}": 0,
        "requests_waiting{}": 0,
        "kv_blocks{}": 32,
        "kv_blocks_free{}": 32,
        "kv_usage_ratio{}": 0,
        "preemptions_total{}": 0,
        "prefix_cache_hits_total{}": 0,
        "compiles_total{}": 0,
        "engine_up{}": 1,
        "prefill_seconds_count{}": 3,
        "decode_seconds_count{}": 3,
        "prompt_length_tokens_count{}": 3,
        "prompt_length_tokens_sum{}": 5 + 7 + 4,
        "completion_length_tokens_count{}": 5,
        "completion_length_tokens_sum{}": 2 * 5 + 2 * 7 + 2,
    }
    vllm = {
        "num_requests_running{model_name=fake}": 0,
        "num_requests_waiting{model_name=fake}": 0,
        "kv_cache_usage_perc{model_name=fake}": 0,
        "prompt_tokens_total{model_name=fake}": 5 + 7 + 4,
        "generation_tokens_total{model_name=fake}": 2 * 5 + 2 * 7 + 2,
        "num_preemptions_total{model_name=fake}": 0,
        "request_success_total{finished_reason=stop,model_name=fake}": 4,
        "time_to_first_token_seconds_count{model_name=fake}": 3,
        "request_queue_time_seconds_count{model_name=fake}": 3,
        "request_generation_tokens_sum{model_name=fake}": 2 * 5 + 2 * 7 + 2,
        "gpu_cache_usage_perc{model_name=fake}": 0,
        "time_per_output_token_seconds_count{model_name=fake}": 2 * 4 + 2 * 6 + 1,
        "request_time_per_output_token_seconds_count{model_name=fake}": 3,
        "request_inference_time_seconds_count{model_name=fake}": 3,
        "request_max_num_generation_tokens_sum{model_name=fake}": 5 + 7 + 2,
        "request_params_n_sum{model_name=fake}": 2 + 2 + 1,
    }
    assert {name: found[f"vllm:{name}"] for name in vllm} == vllm
    assert {name: found[f"fullstride_llm_{name}"] for name in expected} == expected
    assert found["process_resident_memory_bytes{}"] > 0
    queue, prefill, decode, inference, whole = (
        found[f"{PREFIX}{name}_seconds_sum{{}}"] for name in ("queue", "prefill", "decode", "inference", "request")
    )
    assert prefill >= 3 * 0.01  # a step each, which is no waiting
    assert inference == pytest.approx(prefill + decode)
    assert whole == pytest.approx(queue + inference)


def test_gauges_while_it_runs():
    engine = FakeEngine(blocks=10, delay=0.05, max_sequences=2)
    with fake_server(engine) as live, httpx.Client(base_url=live.url) as http:
        body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "n": 3}
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}):
            found = _samples(http)
        until(lambda: engine.free == engine.blocks and live.bridge.stats.free_blocks == 10)
        after = _samples(http)
    assert found["fullstride_llm_requests_running{}"] == 2
    assert found["fullstride_llm_requests_waiting{}"] == 1
    assert found["fullstride_llm_kv_usage_ratio{}"] == 0.8
    assert after["fullstride_llm_kv_usage_ratio{}"] == 0
    assert after["fullstride_llm_requests_aborted_total{reason=disconnect}"] == 1


def _rows(text: str) -> list[list[list[str]]]:
    """Names of each cell of a page's tables, without labels."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [[re.findall(r"`(\w+)(?:\{[\w,]+\})?`", cell) for cell in row] for row in rows]


def test_the_page_has_every_name():
    own, vllm = PAGE.read_text().split("## By vLLM's names")
    with fake_server() as live, httpx.Client(base_url=live.url) as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    counters = {family.name for family in families if family.type == "counter"}
    written = {f.name + "_total" * (f.name in counters) for f in families if not f.name.endswith("_created")}
    assert {PREFIX + name for names, *_ in _rows(own) for name in names} - {PREFIX + "replica_up"} == {
        name for name in written if name.startswith(PREFIX)
    }
    pairs = {(VLLM + theirs, PREFIX + ours) for row in _rows(vllm) for theirs, ours in zip(*row, strict=True)}
    declared = {
        (VLLM + theirs + end, ours + end)
        for ours, names in Metrics().vllm.items()
        for theirs in names
        for end in ["_total" * (ours in counters)]
    }
    assert pairs == declared
    assert {theirs for theirs, _ in pairs} == {name for name in written if name.startswith(VLLM)}


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
def test_promtool_finds_no_fault():
    with fake_server() as live, httpx.Client(base_url=live.url) as http:
        http.post("/v1/completions", json={"prompt": "abc"})
        text = http.get("/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    # What vLLM chose: colons, which are for rules, and a unit in short.
    faults = [line for line in done.stderr.decode().splitlines() if not line.startswith(VLLM)]
    assert faults == []
