"""The server as a process of its own, stopped by a signal."""

import gc
import re
import signal
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.server.app import create_app
from fullstride.llm.server.launch import DrainingServer, check_free, name_of, run, serve
from fullstride.llm.server.served_model import ServedModel
from fullstride.process.gc_paused import gc_paused
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.fake_tokenizer import FakeTokenizer
from tests.llm.server.live import fake_server, until

SCRIPT = """
from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.launch import run
from fullstride.llm.server.served_model import ServedModel
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.fake_tokenizer import FakeTokenizer

served = ServedModel(("fake",), FakeTokenizer(), 512)
limits = ServerLimits(drain_seconds=60.0)
run(create_app(FakeEngine(delay=0.01), served, concurrent=8, limits=limits), host="{host}", port=0)
"""


@pytest.fixture
def process():
    """Starts a server; its lines of the log can be read."""
    started = []

    def start(host: str = "127.0.0.1") -> tuple[subprocess.Popen, list[str]]:
        child = subprocess.Popen([sys.executable, "-c", SCRIPT.format(host=host)], stderr=subprocess.PIPE, text=True)
        started.append(child)
        lines = []
        assert child.stderr is not None
        for line in child.stderr:
            lines.append(line)
            if "running on" in line:
                break
        return child, lines

    yield start
    for child in started:
        child.kill()
        child.communicate()


def _collectable(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects())


def test_collections_pass_over_what_was_there_before_the_server():
    before = [object()]
    with fake_server() as live:
        meanwhile = [object()]
        assert (_collectable(before), _collectable(meanwhile)) == (False, True)
        assert httpx.get(f"{live.url}/health").status_code == 200
    assert _collectable(before)


class Cycle:
    """Refers to itself."""

    def __init__(self):
        self.itself = self


def test_garbage_of_the_start_is_not_kept(monkeypatch):
    server = create_app(FakeEngine(), ServedModel(("fake",), FakeTokenizer(), 512), concurrent=8)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(DrainingServer, "run", lambda _: left.append(garbage()))
    left: list[Cycle | None] = []
    with gc_paused():
        garbage = weakref.ref(Cycle())
        assert garbage() is not None
        run(server, port=0)
    assert left == [None]


def test_sigterm_finishes_what_was_accepted_and_exits_with_0(process):
    child, lines = process()
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as streamed:
            events = streamed.iter_lines()
            next(events)
            until(lambda: "requests_running 2.0" in httpx.get(f"{url}/metrics").text)
            with httpx.Client(base_url=url) as kept_alive:
                assert kept_alive.get("/ready").status_code == 200
                child.send_signal(signal.SIGTERM)
                until(lambda: httpx.get(f"{url}/ready").status_code == 503)
                for ask in (httpx.post, kept_alive.post):
                    refused = ask(f"{url}/v1/completions", json=body)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                assert (kept_alive.get("/ready").status_code, kept_alive.get("/health").status_code) == (503, 200)
            rest = list(events)
        assert whole.result().json()["choices"][0]["finish_reason"] == "length"
    assert rest[-2] == "data: [DONE]"
    assert child.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert "no API key" not in "".join(lines)


def test_a_second_interrupt_ends_it_without_waiting(process):
    child, lines = process()
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])
    body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "n": 16, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as streamed:
        events = streamed.iter_lines()  # kept: one that is collected closes the connection, which ends the completions
        next(events)
        child.send_signal(signal.SIGINT)
        until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        child.send_signal(signal.SIGINT)
        child.wait(30)
        rest = []
        with suppress(httpx.TransportError):  # the connection may end in the middle of a chunk
            rest.extend(events)
    assert "data: [DONE]" not in rest  # its sixteen completions, eight at a time, were not waited for


def test_who_opens_it_to_all_is_told(process):
    _, lines = process("0.0.0.0")
    assert "0.0.0.0 is reachable from other machines, and there is no API key" in "".join(lines)


def test_a_port_that_is_taken_is_found_out_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: address already in use"):
            serve("no/such/model", port=port)
    check_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen on host.invalid:1"):
        check_free("host.invalid", 1)


def test_a_model_without_a_name_is_called_as_its_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for source in (".", tmp_path, f"{tmp_path}/", "./link/.."):
        assert name_of(source) == tmp_path.name
    assert [name_of(source) for source in ("smollm2", "link", "a/b.gguf")] == ["smollm2", "link", "b.gguf"]
