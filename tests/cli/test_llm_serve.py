import sys

import pytest
from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.speculative_config import SpeculativeConfig
from fullstride.llm.server import launch as serving
from fullstride.llm.server.limits import ServerLimits


@pytest.fixture
def served(monkeypatch):
    """Record the arguments of `serve` instead of serving."""
    calls = []
    monkeypatch.setattr(serving, "serve", lambda source, **settings: calls.append((source, settings)))
    return calls


def test_nothing_but_a_model_is_needed(served):
    assert CliRunner().invoke(app, ["llm", "serve", "--model", "smollm2"]).exit_code == 0
    ((source, settings),) = served
    assert source == "smollm2"
    assert (settings["host"], settings["port"], settings["api_keys"], settings["names"]) == ("127.0.0.1", 8000, (), ())
    assert (settings["engine"], settings["limits"]) == (EngineConfig(), ServerLimits())


def test_settings_and_keys(served):
    arguments = ["--host", "0.0.0.0", "--port", "0", "--name", "a", "--name", "b", "--engine", "kv_blocks=9"]
    run = CliRunner().invoke(
        app,
        ["llm", "serve", "--model", "x", *arguments, "--limit", "queue=1", "--limit", "n=2"],
        env={"FULLSTRIDE_API_KEY": "one two"},
    )
    assert run.exit_code == 0, run.output
    ((_, settings),) = served
    assert (settings["names"], settings["api_keys"]) == (["a", "b"], ["one", "two"])
    assert (settings["engine"], settings["limits"]) == (EngineConfig(kv_blocks=9), ServerLimits(queue=1, n=2))


def test_adapters(served):
    start = ["llm", "serve", "--model", "x", "--lora", "a=b/c=d"]
    assert CliRunner().invoke(app, [*start, "--lora-modules", "e=f"]).exit_code == 0
    assert served[0][1]["adapters"] == {"a": "b/c=d", "e": "f"}
    for wrong, why in {"g": "expected NAME=PATH", "=h": "expected NAME=PATH", "a=i": "the name is given twice"}.items():
        run = CliRunner().invoke(app, [*start, "--lora", wrong])
        assert run.exit_code == 2
        assert f"--lora {wrong}: {why}" in run.stderr


@pytest.mark.parametrize("empty", ["", "  "])
def test_a_variable_without_a_key_opens_no_server(served, empty):
    arguments, env = ["llm", "serve", "--model", "x"], {"FULLSTRIDE_API_KEY": empty}
    run = CliRunner().invoke(app, arguments, env=env)
    assert (run.exit_code, served) == (2, [])
    assert "FULLSTRIDE_API_KEY is empty: expected one key or more" in run.stderr
    assert CliRunner().invoke(app, [*arguments, "--api-key", "mine"], env=env).exit_code == 0
    assert served[0][1]["api_keys"] == ["mine"]


def test_devices_for_one_model_and_for_copies(served):
    arguments = ["llm", "serve", "--model", "x", "--engine", "kv_blocks=9"]
    run = CliRunner().invoke(app, [*arguments, "--tensor-parallel-size", "2", "--data-parallel-size", "3"])
    assert run.exit_code == 0, run.output
    ((_, settings),) = served
    assert settings["engine"] == EngineConfig(kv_blocks=9, tensor_parallel_size=2)
    assert settings["data_parallel_size"] == 3


def test_keys_and_values_in_fp8(served):
    run = CliRunner().invoke(app, ["llm", "serve", "--model", "x", "--kv-cache-dtype", "fp8"])
    assert run.exit_code == 0, run.output
    assert served[0][1]["engine"] == EngineConfig(kv_cache_dtype="fp8")
    refused = CliRunner().invoke(app, ["llm", "serve", "--model", "x", "--kv-cache-dtype", "int4"])
    assert refused.exit_code == 2
    assert "kv_cache_dtype=int4: expected one of auto, fp8" in refused.stderr


def test_drafts_by_vllms_option(served):
    arguments = ["llm", "serve", "--model", "x", "--speculative-config"]
    run = CliRunner().invoke(app, [*arguments, '{"method": "ngram", "num_speculative_tokens": 4}'])
    assert run.exit_code == 0, run.output
    assert served[0][1]["engine"] == EngineConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=4))
    for text, message in (
        ("{", "--speculative-config {: expected JSON: expecting property name"),
        ('"ngram"', "speculative_config='ngram': expected a dict"),
        ('{"method": "eagle"}', "speculative_config: method=eagle: expected one of draft_model, ngram"),
    ):
        refused = CliRunner().invoke(app, [*arguments, text])
        assert refused.exit_code == 2
        (line,) = refused.stderr.splitlines()
        assert message in line
    refused = CliRunner().invoke(app, [*arguments[:-1], "--engine", 'speculative_config={"method": "ngram"}'])
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)


def test_what_is_not_installed_is_named(monkeypatch):
    for module in ("app", "launch"):
        monkeypatch.delitem(sys.modules, f"fullstride.llm.server.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    run = CliRunner().invoke(app, ["llm", "serve", "--model", "x"])
    assert run.exit_code == 2
    assert run.stderr == "error: fastapi is not installed; run, from the root of a clone: pip install '.[serve]'\n"


def test_a_wrong_setting_is_one_line(served):
    run = CliRunner().invoke(app, ["llm", "serve", "--model", "x", "--limit", "queu=1"])
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr.startswith("error: --limit=queu: expected one of queue")
    assert not served


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nope"], "model=/nope: no such file or folder"),
        (["--api-key", ""], "API key 1 is empty"),
        (["--name", "x", "--name", ""], "a name is empty: expected the model's name"),
        (["--tensor-parallel-size", "64"], "with tensor_parallel_size=64: expected 64 devices, there are"),
        (["--data-parallel-size", "64"], "data_parallel_size=64 with tensor_parallel_size=1: expected 64 devices"),
        (["--engine", "max_length=100000"], "max_length=100000: expected at most 256"),
        (
            ["--engine", "max_tokens_per_step=4", "--engine", "max_sequences=4"],
            "max_tokens_per_step=4: expected more than",
        ),
        (["--engine", "kv_memory=1000"], "a KV cache of 1000 bytes is too small: expected at least 8192"),
        (["--engine", "kernels=token"], "kernels=token: made for a GPU of compute capability 9.0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_compiled(tiny_llama, monkeypatch, arguments, message):
    monkeypatch.setattr(serving, "Engine", lambda *_: pytest.fail("an engine was made"))
    run = CliRunner().invoke(app, ["llm", "serve", "--model", str(tiny_llama), "--port", "0", *arguments])
    assert run.exit_code == 2, run.output
    (line,) = run.stderr.splitlines()
    assert message in line
