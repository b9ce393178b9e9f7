"""The embedded Valkey as a process of the run: ``python -m lorabridge.bridge.run.valkey FOLDER``.

Its URL (without the password) is in ``FOLDER/url`` while it answers; the password is in ``FOLDER/password``.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from lorabridge.bridge.errors import BridgeError, StreamUnreachable
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import embedded_valkey

_LOOK_S = 0.5
_RESTARTS = 10


def section(folder: Path) -> RedisSection | None:
    """How to reach the server of ``folder``; None if it does not answer yet."""
    try:
        url = (folder / "url").read_text()
    except FileNotFoundError:
        return None
    return RedisSection(url=url, password_file=folder / "password")


def serve(folder: Path, stopped: threading.Event) -> None:
    """Run a Valkey server with its data in ``folder`` until ``stopped``; one that is killed is started again.

    Raises:
        PortTaken: it did not start.
        StreamUnreachable: it ends by itself, time after time.
    """
    for restarts in range(_RESTARTS + 1):
        try:
            _serve(folder, stopped)
            return
        except StreamUnreachable as error:
            if restarts == _RESTARTS:
                raise
            print(f"lorabridge: {error.diagnostics()} It is started again.", file=sys.stderr)


def _serve(folder: Path, stopped: threading.Event) -> None:
    address = folder / "url"
    with embedded_valkey(folder) as reached:
        try:
            beside = folder / ".url"
            beside.write_text(reached.url)
            beside.replace(address)
            while not stopped.wait(_LOOK_S):
                connect(reached.model_copy(update={"connect_s": 3, "outage_s": 1})).close()
        finally:
            address.unlink(missing_ok=True)


def main(folder: Path) -> int:
    """Serve until SIGTERM; an exit code as in ``lorabridge.bridge.errors``."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    (folder / "url").unlink(missing_ok=True)
    try:
        serve(folder, stopped)
    except BridgeError as error:
        print(f"lorabridge: {error.diagnostics()}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
