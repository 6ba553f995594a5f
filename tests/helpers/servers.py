"""A local file server that can misbehave on purpose."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast


class Files(ThreadingHTTPServer):
    """Serves `contents` by path; `asked` lists the requests."""

    def __init__(self, contents: dict[str, bytes], cut: int | None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents, self.cut = contents, cut
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    """Sends the whole length in the header, and no more than `cut` bytes."""

    def do_GET(self) -> None:
        server = cast(Files, self.server)
        server.asked.append(self.path)
        if (content := server.contents.get(self.path)) is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: server.cut])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing: requests are in the server's list."""


@contextlib.contextmanager
def serving(contents: dict[str, bytes], cut: int | None = None) -> Iterator[Files]:
    """A server of these contents, in a thread of its own."""
    with Files(contents, cut) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
