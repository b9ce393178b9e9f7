"""What a ``[store] url`` may say. It is written to logs and to ``config.toml``, so a secret in it is refused."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from lorabridge.bridge.errors import ConfigError


def check_store_url(url: str) -> str:
    """``url`` if it can be a store's.

    Raises:
        ConfigError: it holds a user, a password or a query (the text of the error quotes none of them), names a file on
            another host (``file://runs/store`` names the host ``runs``), or is not a URL.
    """
    try:
        parts = urlsplit(url)
        password, port = parts.password, parts.port
    except ValueError as error:
        raise ConfigError("[store] url is not a URL", action=_GIVE) from error
    if len(parts.scheme) < 2:
        return url
    remote = parts.scheme != "file"
    nowhere = parts.scheme in ("http", "https", "s3") and not parts.netloc
    chained = not url[len(parts.scheme) :].startswith("://") or "::" in parts.path  # in a host it is IPv6
    if nowhere or chained:
        raise ConfigError("[store] url is not a URL that a store can have", action=_GIVE)
    if password is not None or (remote and ("@" in parts.netloc or parts.query or parts.fragment)):
        raise ConfigError(
            "[store] url holds a user, a password or a query, and would carry it into logs and config.toml",
            action="Leave it out: S3 takes keys from AWS_ACCESS_KEY_ID and so on or ~/.aws, http from ~/.netrc",
        )
    if not remote and (parts.netloc not in ("", "localhost") or port is not None):
        raise ConfigError(f"[store] url {url!r} is a file on another host", action=_GIVE)
    return url


_GIVE = "Give a folder, file:///absolute/path, s3://bucket/prefix, or http(s)://host/path to read only"

StoreUrl = Annotated[str, AfterValidator(check_store_url)]
"""For settings. ``ConfigError`` comes out of pydantic as it is; pydantic's own errors would quote the URL."""
