"""The only client of a vLLM server: sampling through its public door, state and swaps through its control door."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.errors import (
    GeneratorError,
    GeneratorUnreachable,
    NotServed,
    PluginMissing,
    Quarantined,
    RequestRefused,
    SlotsBusy,
    SwapFailed,
    TokenRefused,
)
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import EngineSpan, KvMode, Residency, SwapMode
from lorabridge.bridge.trajectory import FinishReason, Sampling, Unestablished
from lorabridge.rollout.wire import (
    BEGAN_ON,
    GENERATE,
    UNIX,
    GeneratorState,
    ScoreRequest,
    Scores,
    SwapReply,
    SwapRequest,
    name_of,
)

_IDLE_S = 2.0
_PASSING = (aiohttp.ClientConnectionError, TimeoutError)
T = TypeVar("T")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled completion as the engine reports it; ``spans`` is None if the engine reported none.

    ``began_on`` is the digest that all of it was sampled with, if its policy is swapped pinned.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[EngineSpan, ...] | None
    finish_reason: FinishReason
    began_on: str | None = None


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...] = ()
    logprobs: _Logprobs | None = None
    weight_versions: tuple[EngineSpan, ...] | None = None
    finish_reason: FinishReason | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    request_id: str = ""


class Moved(Exception):
    """The generator is at another instance or epoch than the swap named: look again."""


class Generator:
    """Use as an async context manager.

    Args:
        url: public door, ``http://host:port``.
        control: control door, ``http://host:port`` or ``unix:PATH``.
        token: of the control door.
        connections: requests to the public door at once.

    Attributes:
        name: what it is called in Redis and on record (``wire.name_of``).
    """

    def __init__(self, url: str, control: str, token: str, connections: int) -> None:
        self.url, self._control_url = url.rstrip("/"), control.rstrip("/")
        self.name = name_of(self.url, socket.gethostname())
        self._token, self._connections = token, connections

    async def __aenter__(self) -> Generator:
        # A server closes connections that were idle for 5 s (uvicorn's default), perhaps just as one is used again.
        # So idle ones are dropped before that, and the control door, asked rarely, gets a new one each time.
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._public = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_IDLE_S), timeout=unlimited
        )
        is_unix = self._control_url.startswith(UNIX)
        connector = (
            aiohttp.UnixConnector(self._control_url.removeprefix(UNIX), force_close=True)
            if is_unix
            else aiohttp.TCPConnector(force_close=True)
        )
        self._control = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=120, sock_connect=10),
            headers={"Authorization": f"Bearer {self._token}"},
        )
        self._control_base = "http://control" if is_unix else self._control_url
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._public.close()
        await self._control.close()

    async def state(self) -> GeneratorState:
        """What it serves now and how it was started. Raises ``GeneratorError``."""
        return _parse(GeneratorState, await self._ask("GET", "/state"))

    async def residencies(self, after: int) -> list[Residency]:
        """Its residency records of epochs later than ``after``. Raises ``GeneratorError``."""
        return _parse(list[Residency], await self._ask("GET", f"/residency?after={after}"))

    async def restarts(self, request_id: str) -> list[int]:
        """After how many sampled tokens the KV of a request that has ended was computed afresh; it can be asked once.

        Raises:
            Unestablished: the generator has forgotten.
            GeneratorError: it cannot be asked.
        """
        answer = await self._ask("POST", "/restarts", msgspec.json.encode([request_id]))
        (restarts,) = _parse(list[list[int] | None], answer)
        if restarts is None:
            raise Unestablished("it was preempted, and the generator has forgotten where")
        return restarts

    async def score(self, policy: str, sequences: tuple[tuple[int, ...], ...]) -> Scores:
        """Logprobs of given token ids, with the policy's adapter and without any.

        Raises:
            Moved: the policy is not served.
            GeneratorError: it cannot be asked, or refuses.
        """
        request = ScoreRequest(policy=policy, sequences=sequences)
        return _parse(Scores, await self._ask("POST", "/score", msgspec.json.encode(request)))

    async def judged(self, judgement: Judgement) -> None:
        """Tell it what its canary said; one that does not match quarantines it. Raises ``GeneratorError``."""
        await self._ask("POST", "/judged", msgspec.json.encode(judgement))

    async def attest(self) -> dict[str, str | None]:
        """Have it look at every slot: by policy, what is wrong with it, or None. Raises ``GeneratorError``."""
        return _parse(dict[str, str | None], await self._ask("POST", "/attest"))

    async def drain(self) -> int:
        """Have it refuse new requests from now on; how many are in flight. Raises ``GeneratorError``."""
        return _parse(int, await self._ask("POST", "/drain"))

    async def swap(
        self, manifest: Manifest, now: Residency, kv: KvMode | None = None, *, mode: SwapMode | None = None,
        fence: int = 0,
    ) -> SwapReply:  # fmt: skip
        """Have it serve ``manifest``, if it still is at ``now``.

        Args:
            manifest: the version.
            now: what the caller knows it to be at.
            kv: what becomes of running requests' KV; None leaves that to its configuration.
            mode: how it is swapped; None leaves that to its configuration too.
            fence: number of the caller's lease.

        Raises:
            Moved: it is not; read its state and try again.
            SlotsBusy: there is room only when samples have ended.
            SwapFailed: it serves what it served before.
            GeneratorError: unreachable, in quarantine, or the token is wrong.
        """
        request = SwapRequest(
            policy=manifest.policy,
            version=manifest.version,
            digest=manifest.digest,
            instance=now.instance,
            epoch=now.epoch,
            kv=kv,
            mode=mode,
            fence=fence,
            operation=uuid.uuid4().hex,
        )
        return _parse(SwapReply, await self._ask("POST", "/swap", msgspec.json.encode(request)))

    async def sample(self, policy: str, prompt: Sequence[int], sampling: Sampling, eos: Sequence[int]) -> Completion:
        """Sample one completion of ``prompt`` (token ids) from ``policy``.

        Raises:
            GeneratorUnreachable: it went away; the sample is lost.
            NotServed: the policy is not served any more.
            RequestRefused: this prompt cannot be sampled.
            GeneratorError: it refused otherwise.
        """
        # No seed per request: with one, vLLM's CPU build dies on a prompt that is prefilled in parts (torch's CPU
        # generator has no offset to set back), and a sample that lives through a swap cannot be drawn again anyway.
        parameters = {**msgspec.to_builtins(sampling), "logprobs": 0, "stop_token_ids": list(eos)}
        body = {"model": policy, "token_ids": list(prompt), "sampling_params": parameters}
        try:
            async with self._public.post(
                self.url + GENERATE, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
            ) as reply:
                answer = await reply.read()
                if reply.status != 200:
                    raise _refusal(self.url, reply.status, answer)
                began_on = reply.headers.get(BEGAN_ON)
        except _PASSING as error:
            raise self._gone(error) from error
        generated = _parse(_Generated, answer)
        (choice,) = generated.choices
        if choice.logprobs is None or choice.finish_reason is None:
            raise GeneratorError(
                f"{self.url} ended a completion with {choice.finish_reason!r}", action="See the server's log"
            )
        return Completion(
            request_id=generated.request_id,
            token_ids=choice.token_ids,
            logprobs=tuple(entry.logprob for entry in choice.logprobs.content),
            spans=choice.weight_versions,
            finish_reason=choice.finish_reason,
            began_on=began_on,
        )

    async def healthy(self) -> bool:
        """Whether the public door answers that the engine lives."""
        try:
            async with self._public.get(self.url + "/health") as reply:
                return reply.status == 200
        except _PASSING:
            return False

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            async with self._control.request(method, self._control_base + path, data=body) as reply:
                answer = await reply.read()
        except _PASSING as error:
            # Only a refused connection says that nobody is there; a lost one may be a server that is busy or ending.
            if isinstance(error, aiohttp.ClientConnectorError) and await self.healthy():
                raise PluginMissing(
                    f"{self.url} is a vLLM server, but nothing answers at its control door {self._control_url}",
                    action="Start it with `lorabridge serve`, or correct [generators] control",
                ) from error
            raise self._gone(error) from error
        if reply.status == 200:
            return answer
        raise _refusal(self._control_url, reply.status, answer)

    def _gone(self, error: BaseException) -> GeneratorUnreachable:
        why = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else str(error)
        return GeneratorUnreachable(
            f"{self.url} does not answer: {why or type(error).__name__}", action="Is the server up? See its log"
        )


def _refusal(where: str, status: int, answer: bytes) -> Exception:
    """The error that a refusal stands for."""
    try:
        why = str(msgspec.json.decode(answer)["error"]["message"]).removeprefix("lorabridge: ")
    except (msgspec.DecodeError, KeyError, TypeError):
        why = answer[:200].decode(errors="replace")
    kinds: dict[int, Exception] = {
        401: TokenRefused(f"{where} refused the control token", action="Use the token the server was started with"),
        400: RequestRefused(f"{where}: {why}", action="Shorten the prompt, or see the server's log"),
        404: NotServed(f"{where}: {why}", action="Is it a server started with `lorabridge serve`?"),
        409: Moved(why),
        413: RequestRefused(f"{where}: {why}", action="Shorten the prompt"),
        423: SlotsBusy(f"{where}: {why}", action="Wait"),
        422: SwapFailed(f"{where}: {why}", action="See the server's log"),
        424: SwapFailed(f"{where}: {why}", action="Check that the server's [store] url is the trainer's store"),
        503: Quarantined(f"{where}: {why}", action="Restart this generator"),
    }
    return kinds.get(status) or GeneratorError(f"{where} answered {status}: {why}", action="See the server's log")


def _parse(kind: type[T], answer: bytes) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PluginMissing(
            f"an answer that is not ours: {error}", action="Run the same lorabridge in servers and workers"
        ) from error
