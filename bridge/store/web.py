"""A store's folder behind a web server, read only. Of the standard library, which says what a server answered."""

from __future__ import annotations

import base64
import netrc
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lorabridge.bridge.errors import ConfigError, StoreError
from lorabridge.bridge.store.adapter_files import BLOCK, capped, check_size

# A server that says nothing for so long is lost.
_ANSWER_S = 30.0
READ_ONLY = "a web server cannot create a version only if it is not there"


class WebShelf:
    """Files under an ``http://`` or ``https://`` URL. Proxies are the environment's, logins those of ``~/.netrc``."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._login = _login(urlsplit(url).hostname or "")

    def blocks(self, name: str, limit: int) -> Iterator[bytes]:
        # What is not there yet may be there a second later: a proxy must not remember the answer.
        request = Request(f"{self.url}/{name}", headers={"Cache-Control": "no-cache", "Accept-Encoding": "identity"})
        if self._login:
            request.add_unredirected_header("Authorization", self._login)  # no other host gets to see it
        try:
            with urlopen(request, timeout=_ANSWER_S) as response:
                yield from _body(response, f"{self.url}/{name}", limit)
        except HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(name) from error
            raise StoreError(
                f"{self.url}/{name}: the server answers {error.code} {error.reason}",
                action="Let it be read; a bucket answers 403 for what is not there unless it may be listed",
            ) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise StoreError(f"{self.url} does not answer: {reason}", action="Is the web server running?") from error

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            return b"".join(self.blocks(name, limit))
        except FileNotFoundError:
            return None


def _body(response: HTTPResponse, url: str, limit: int) -> Iterator[bytes]:
    if response.length is not None:
        check_size(url, response.length, limit)
    yield from capped(url, iter(lambda: response.read(BLOCK), b""), limit)
    if response.length:  # what is left of the announced length
        raise StoreError(f"{url} ended {response.length} bytes too early", action="Try again; see the server's log")


def _login(host: str) -> str | None:
    """The Authorization header for a host that ``~/.netrc`` has a password for."""
    file = Path.home() / ".netrc"
    try:
        login = netrc.netrc(file).authenticators(host)
    except FileNotFoundError:
        return None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(f"{file}: {error}", action="Correct it, and let only its owner read it") from error
    if login is None:
        return None
    user, _, password = login
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
