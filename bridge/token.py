"""The control token: from the environment or a file, never from a command line."""

from __future__ import annotations

import os
import secrets

from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.settings import Settings

VARIABLE = "LORABRIDGE_CONTROL_TOKEN"
_MIN_LENGTH = 16


def control_token(settings: Settings) -> str:
    """The token of the generators' control doors.

    Raises:
        ConfigError: there is none, it cannot be read, or it is shorter than 16 characters.
    """
    token = os.environ.get(VARIABLE, "")
    if not token:
        try:
            token = settings.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"no control token: {error}", action=f"Set {VARIABLE}, or [generators] token_file to a readable file"
            ) from error
    if len(token) < _MIN_LENGTH:
        raise ConfigError("the control token is too short", action=f"Use {_MIN_LENGTH} characters or more")
    return token


def ensure_token(settings: Settings) -> None:
    """Make the token file, readable by its owner only, if there is no token yet."""
    if os.environ.get(VARIABLE) or settings.token_file.exists():
        return
    settings.token_file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(settings.token_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32))
