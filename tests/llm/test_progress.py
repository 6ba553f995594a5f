import logging

import jax
import pytest

from fullstride.llm import LLM, progress
from fullstride.llm import llm as offline
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.progress import starting
from fullstride.llm.server import launch as serving
from fullstride.llm.weights import load


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass where a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_at_each_stage_and_not_at_every_program(clock, monkeypatch):
    monkeypatch.setattr(progress, "_plan", lambda total, cached: f"{cached} of {total} are cached")
    lines: list[str] = []
    with starting("m", lines.append) as start:
        assert lines == ["m: loading weights"]
        for done, seconds in ((1, 9), (2, 9), (3, 9), (4, 8)):
            clock[0] += seconds
            start.weights(done, 4)
        assert lines.pop(1) == "m: 2 of 4 layers are loaded after 18 s"
        assert lines.pop(1) == "m: 4 of 4 layers are loaded after 35 s"
        clock[0] -= 35
        for done, seconds in ((0, 7), (1, 1), (2, 1), (2, 20), (3, 1), (9, 40)):
            clock[0] += seconds
            start.programs(done, 9, 4)
    first, *middle, last = lines[1:]
    assert first == "m: 4 of 9 are cached"
    assert middle == ["m: 2 of 9 programs are ready after 29 s", "m: 9 of 9 programs are ready after 70 s"]
    assert last == "m: ready after 70.0 s"


@pytest.mark.parametrize("folder", [None, "/kept/here"])
def test_where_programs_are_kept_is_said_if_they_are(folder):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        lines: list[str] = []
        with starting("m", lines.append) as start:
            start.programs(0, 3)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    more = "; those that an earlier start compiled come from /kept/here" if folder else ""
    assert lines[1] == f"m: compiling 3 programs{more}"


@pytest.mark.parametrize(
    ("cached", "plan"),
    [
        (0, "compiling 3 programs"),
        (2, "reading 2 programs from {}, compiling 1"),
        (3, "reading 3 programs from {}, compiling 0"),
    ],
)
def test_programs_that_are_read_are_not_said_to_be_compiled(tmp_path, monkeypatch, cached, plan):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    lines: list[str] = []
    with starting("m", lines.append) as start:
        start.programs(0, 3, cached)
    assert lines[1] == f"m: {plan.format(tmp_path / 'programs')}"


def test_a_start_that_fails_is_not_said_to_be_ready():
    lines: list[str] = []
    with pytest.raises(ValueError, match="no"), starting("m", lines.append):
        raise ValueError("no")
    assert lines == ["m: loading weights"]


class Instant(Engine):
    """An engine of three programs that takes no time."""

    def __init__(self, loaded, config, ready, devices=None, *, loading, adapters=None):
        self.loaded = loaded
        loading(1, 1)
        for done in range(4):
            ready(done, 3)

    def share_grammars(self, other):
        assert isinstance(other, Instant)


def test_a_model_in_python_says_what_its_start_does_unless_it_is_silenced(tiny_llama, monkeypatch, capsys):
    monkeypatch.setattr(offline, "Engine", Instant)
    LLM(tiny_llama)
    out, err = capsys.readouterr()
    stages = [line.removeprefix(f"{tiny_llama}: ").split()[0] for line in err.splitlines()]
    assert (stages, out) == (["loading", "compiling", "ready"], "")
    LLM(load(tiny_llama))
    assert capsys.readouterr().err.startswith(f"{tiny_llama.name}: loading weights\n")
    LLM(tiny_llama, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("count", "names"), [(1, ["served"]), (2, ["served, engine 1 of 2", "served, engine 2 of 2"])])
def test_a_server_logs_the_same_lines_for_each_engine(tiny_llama, monkeypatch, caplog, count, names):
    monkeypatch.setattr(serving, "Engine", Instant)
    with caplog.at_level(logging.INFO, "fullstride.llm.server"):
        serving.replicated(load(tiny_llama), EngineConfig(), count, "served")
    stages = [message.rpartition(": ") for message in caplog.messages]
    assert [(name, said.split()[0]) for name, _, said in stages] == [
        (name, stage) for name in names for stage in ("loading", "compiling", "ready")
    ]
