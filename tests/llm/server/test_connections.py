"""Limits of connections before a request is there: bytes, time, places; answers are HTTP, and others go on."""

import json
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from fullstride.llm.server import connections
from fullstride.llm.server.connections import HEADER_BYTES, make_room
from tests.llm.server.live import Live, fake_server, until

KEY = "of-this-server"
MOST = 12


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with fake_server(api_keys=(KEY,), header_seconds=0.5, body_seconds=0.7, connections=MOST) as live:
        yield live


@pytest.fixture
def connect(live: Live) -> Iterator:
    """Opens connections; the server has forgotten those of other tests."""
    until(lambda: _open(live) == 0)
    opened = []

    def _connect() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])), timeout=20))
        return opened[-1]

    yield _connect
    for each in opened:
        each.close()


def _open(live: Live) -> int:
    """Connections that the server has: it is a part of this process."""
    port = int(live.url.rpartition(":")[2])
    return sum(
        bool(each.laddr) and each.laddr.port == port and each.status != psutil.CONN_LISTEN
        for each in psutil.Process().net_connections("tcp")
    )


def _answer(connection: socket.socket) -> tuple[int, dict]:
    """Status and error of what is sent until the connection is closed."""
    received = b""
    try:
        while block := connection.recv(65_536):
            received += block
    except ConnectionResetError:
        pass
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def _drip(connection: socket.socket, piece: bytes, seconds: float = 3.0) -> None:
    """Send a piece again and again, until the server has had enough."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            connection.sendall(piece)
            time.sleep(0.05)
    except OSError:
        return
    raise AssertionError("the server took all of it")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ",
        b"GET /" + b"a" * 100,
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10,
    ],
)
def test_a_header_without_end_is_a_431(live, connect, begin):
    connection = connect()
    connection.sendall(begin + b"a" * (HEADER_BYTES + 1 - len(begin)))
    status, error = _answer(connection)
    assert (status, error["code"]) == (431, "header_too_large")
    assert str(HEADER_BYTES) in error["message"]
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_a_header_just_within_the_limit_is_read(live):
    assert httpx.get(f"{live.url}/health", headers={"x-long": "a" * (HEADER_BYTES - 1000)}).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_a_header_that_does_not_come_to_its_end_is_a_408(connect, sent):
    connection = connect()
    connection.sendall(sent)
    status, error = _answer(connection)
    assert (status, error["code"]) == (408, "request_timeout")
    assert "0.5 s" in error["message"]


def test_a_header_that_comes_byte_by_byte_has_no_more_time(connect):
    connection = connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ")
    _drip(connection, b"a")


def _post(length: int | None, key: str = KEY) -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{size}\r\n\r\n".encode()


@pytest.mark.parametrize("length", [100, None])
def test_a_body_that_does_not_come_to_its_end_is_a_408(connect, length):
    connection = connect()
    connection.sendall(_post(length))
    status, error = _answer(connection)
    assert (status, error["code"]) == (408, "request_timeout")
    assert "0.7 s" in error["message"]


def test_a_body_that_comes_byte_by_byte_has_no_more_time(connect):
    for key in (KEY, "wrong"):  # one is answered at once, and may not stay for that
        connection = connect()
        connection.sendall(_post(100_000, key))
        _drip(connection, b"a")


def test_a_second_request_has_as_much_time_as_the_first():
    """Three requests take longer than one may, and each a good part of it, so that a slow machine passes."""
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with fake_server(header_seconds=2.0) as live:
        port = int(live.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            for _ in range(3):
                time.sleep(0.4)
                connection.sendall(get[:20])
                time.sleep(0.4)
                connection.sendall(get[20:])
                answer = b""
                while not answer.endswith(b"}"):  # the body may come by itself
                    answer += connection.recv(65_536)
                assert answer.startswith(b"HTTP/1.1 200")
            connection.sendall(get[:20])
            assert _answer(connection)[0] == 408


def test_what_is_no_http_is_a_400(connect):
    for nonsense in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\nnothing\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        connection = connect()
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)
        assert _answer(connection)[0] == 400


def test_an_upgrade_is_no_way_around(live):
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "eA==",
        "sec-websocket-version": "13",
    }
    assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 401


def test_more_connections_than_there_is_room_for_are_a_503(live, connect):
    held = [connect() for _ in range(MOST)]
    until(lambda: _open(live) == MOST)
    status, error = _answer(connect())
    assert (status, error["code"]) == (503, "too_many_connections")
    held[0].close()
    until(lambda: _open(live) < MOST)
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_slow_answers_are_no_slow_requests(live):
    with fake_server(header_seconds=0.2, body_seconds=0.2) as slow, httpx.Client(base_url=slow.url) as http:
        slow.engine.delay = 0.05
        body = {"prompt": "x" * 20, "max_tokens": 15, "ignore_eos": True}
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 200
            assert "finish_reason" in answer.text


def test_there_is_room_for_as_many_files(monkeypatch, caplog):
    made = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: made.append(limits))
    for limits, expected in {(1024, 4096): (1256, 4096), (512, 600): (600, 600), (5000, 6000): None}.items():
        made.clear()
        monkeypatch.setattr(connections.resource, "getrlimit", lambda what, limits=limits: limits)
        make_room(1000)
        assert made == ([] if expected is None else [expected])
    assert "raise ulimit -n" in caplog.text
