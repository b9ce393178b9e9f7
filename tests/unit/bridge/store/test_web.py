"""A store over HTTP against servers that are not honest, not well, or not there."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lorabridge.bridge.errors import ConfigError, StoreError, TooLarge
from lorabridge.bridge.store.web import WebShelf
from lorabridge.bridge.stream.embedded import free_port

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers every GET as a test says, and remembers what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.answer: Answer = lambda request: None
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.headers.append(dict(self.headers))
                outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HOME", str(tmp_path))
    server = Server(tmp_path)
    yield server
    server.close()


def says(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


@pytest.mark.parametrize("status", [404, 410])
def test_what_the_server_says_is_not_there_is_not_there(server: Server, status: int) -> None:
    server.answer = says(status, Content_Length="0")
    assert WebShelf(server.url).get("name", 10) is None
    with pytest.raises(FileNotFoundError):
        list(WebShelf(server.url).blocks("name", 10))


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_server_that_refuses_or_is_ill_is_not_an_empty_store(server: Server, status: int) -> None:
    server.answer = says(status, Content_Length="0")
    with pytest.raises(StoreError, match=f"the server answers {status}"):
        WebShelf(server.url).get("name", 10)


def test_a_server_that_is_not_there_is_not_an_empty_store(server: Server) -> None:
    with pytest.raises(StoreError, match=r"does not answer: .*refused"):
        WebShelf(f"http://127.0.0.1:{free_port()}").get("name", 10)
    server.answer = lambda request: request.connection.close()
    with pytest.raises(StoreError, match="does not answer"):
        WebShelf(server.url).get("name", 10)


def test_a_size_over_the_limit_is_refused_before_it_is_read(server: Server) -> None:
    server.answer = says(200, Content_Length=str(10**12))
    with pytest.raises(TooLarge, match="1000000000000 bytes"):
        WebShelf(server.url).get("name", 10)


def test_more_than_the_limit_without_a_size_is_refused_as_it_comes(server: Server) -> None:
    server.answer = says(200, b"\0" * (3 << 20))
    with pytest.raises(TooLarge):
        list(WebShelf(server.url).blocks("name", 1 << 20))
    server.answer = says(200, b"0123456789")
    assert WebShelf(server.url).get("name", 10) == b"0123456789"


def test_an_answer_that_is_cut_short_is_said_so(server: Server) -> None:
    server.answer = says(200, b"0123", Content_Length="10")
    with pytest.raises(StoreError, match="ended 6 bytes too early"):
        WebShelf(server.url).get("name", 10)


def test_no_cache_may_answer(server: Server) -> None:
    server.answer = says(200, b"x", Content_Length="1")
    WebShelf(server.url).get("name", 10)
    assert server.headers[0]["Cache-Control"] == "no-cache"
    assert "Authorization" not in server.headers[0]


def test_a_login_comes_from_netrc_and_goes_to_that_host_only(server: Server, tmp_path: Path) -> None:
    other = Server(tmp_path)
    try:
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
        (tmp_path / ".netrc").chmod(0o600)
        server.answer = says(302, Location=other.url.replace("127.0.0.1", "localhost") + "/there", Content_Length="0")
        other.answer = says(200, b"x", Content_Length="1")
        assert WebShelf(server.url).get("name", 10) == b"x"
        assert server.headers[0]["Authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()
        assert "Authorization" not in other.headers[0]
    finally:
        other.close()


def test_a_netrc_that_cannot_be_read_is_said_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me passwort secret\n")
    with pytest.raises(ConfigError, match=r"\.netrc") as caught:
        WebShelf(server.url)
    assert "secret" not in caught.value.diagnostics()
