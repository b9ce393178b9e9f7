"""Two hosts on one machine: each has a network, a name, a folder and an environment of its own.

A host is a network namespace whose only way out is a cable to the other, and its processes see the machine's files
through a mount namespace in which the other's folder is empty. What one writes, the other can only hear of.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

# Run in new mount and UTS namespaces: $1 is a folder to hide, $2 the host's name, the rest a command.
_SETTLE = 'mount -t tmpfs -o ro tmpfs "$1" && hostname "$2" && shift 2 && exec "$@"'


def need_namespaces() -> None:
    """Skip the test where hosts cannot be made."""
    for program in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(program) is None:
            pytest.skip(f"two hosts need the program {program}")
    allowed = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, check=False)
    if os.geteuid() != 0 or allowed.returncode != 0:
        pytest.skip("two hosts need root that may make network and mount namespaces")


class Host:
    """One of the two.

    Attributes:
        name: of the machine, as its processes see it.
        address: on the cable.
        folder: all that it writes; the other host sees an empty folder there.
        environment, secrets: of its processes, on top of the test's environment.
    """

    def __init__(self, name: str, address: str, folder: Path, hidden: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.namespace = f"{name}-{os.getpid()}"
        self._hidden = hidden
        (folder / "tmp").mkdir(parents=True)
        # A home and a place for temporary files are a host's own as well.
        self.environment: dict[str, str] = {"TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
        self.secrets: dict[str, str] = {}

    def command(self, *arguments: object) -> list[str]:
        """``arguments`` as this host runs them: the process becomes the command, so that a signal reaches it."""
        into = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts"]
        return [*into, "sh", "-c", _SETTLE, "sh", str(self._hidden), self.name, *map(str, arguments)]

    @contextmanager
    def running(self, name: str, *arguments: object, stdin: str = "") -> Iterator[subprocess.Popen[str]]:
        """A process of this host, its output in ``<name>.log``; it ends with the block, if it has not by then."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(*arguments), stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                env=self._whole_environment(), process_group=0,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        try:
            yield process
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """A command of this host, to its end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, check=False, env=self._whole_environment()
        )

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        """The end of every log, for a failure's message."""
        ends = ((log, log.read_text(errors="replace")[-3000:]) for log in sorted(self.folder.glob("*.log")))
        return "".join(f"--- {self.name} {log.stem}\n{end}\n" for log, end in ends)

    def _whole_environment(self) -> Mapping[str, str]:
        return {**os.environ, **self.environment, **self.secrets}


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Hosts ``a`` and ``b`` in folders of these names, a cable between them; their namespaces go with the block."""
    need_namespaces()
    folders = folder / "a", folder / "b"
    hosts = Host("host-a", "192.0.2.1", folders[0], folders[1]), Host("host-b", "192.0.2.2", folders[1], folders[0])
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            stack.callback(_end_all, host)
        a, b = hosts
        _ip("link", "add", "cable", "netns", a.namespace, "type", "veth", "peer", "name", "cable", "netns", b.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/30", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts


def _end_all(host: Host) -> None:
    """Kill what still runs on the host: torchrun's ranks are sessions of their own."""
    for pid in _ip("netns", "pids", host.namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
