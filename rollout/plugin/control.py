"""What the control door answers: the generator's state, its residency records, and swaps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.residency import Residency
from lorabridge.rollout.plugin.adapters import FileLog
from lorabridge.rollout.plugin.swap import Swapper
from lorabridge.rollout.wire import EngineFacts, GeneratorState, ScoreRequest, Scores, SwapReply, SwapRequest

_BYTES_PER_TOKEN, _BYTES_BESIDES = 16, 1024 * 1024  # in JSON, generously

Restarts = Callable[[list[str]], Awaitable[list[list[int] | None]]]


class Control:
    """Joins swapper, log and facts for the two doors.

    Attributes:
        restarts: for requests that have ended, after how many sampled tokens their KV was computed afresh.
        max_request_bytes: of a request to sample; one whose prompt fits into the context is shorter.
    """

    def __init__(
        self, swapper: Swapper, log: FileLog, facts: EngineFacts, running: Callable[[], int], restarts: Restarts
    ) -> None:  # fmt: skip
        self._swapper, self._log, self._facts, self._running = swapper, log, facts, running
        self.restarts = restarts
        self._draining, self._in_flight = False, 0
        self.max_request_bytes = _BYTES_BESIDES + _BYTES_PER_TOKEN * facts.max_model_len

    def state(self) -> GeneratorState:
        here = self._swapper.instance
        return GeneratorState(
            residency=here.residency,
            quarantine=here.quarantine,
            running=self._running(),
            facts=self._facts,
            fence=self._swapper.fence,
            canary=self._swapper.canary,
            quarantined_ms=here.quarantined_ms,
            failed=self._swapper.failed,
        )

    def residencies(self, after: int) -> list[Residency]:
        """Records of epochs later than ``after``, in order."""
        return [record for record in self._log.records if record.epoch > after]

    async def swap(self, request: SwapRequest) -> SwapReply:
        """See ``Swapper.swap``."""
        return await self._swapper.swap(request)

    async def score(self, request: ScoreRequest) -> Scores:
        """See ``Swapper.score``."""
        return await self._swapper.score(request)

    async def judged(self, judgement: Judgement) -> None:
        """See ``Swapper.judged``."""
        await self._swapper.judged(judgement)

    async def attest(self) -> dict[str, str | None]:
        """See ``Swapper.attest``."""
        return await self._swapper.attest()

    def drain(self) -> int:
        """Refuse new requests from now on; how many are in flight."""
        self._draining = True
        return self._in_flight

    def refusal(self, model: str | None) -> tuple[int, str] | None:
        """Why a request for ``model`` is refused (status, reason), or None if it may be sampled."""
        here = self._swapper.instance
        if self._draining:
            return 503, "this generator is ending"
        if here.quarantine is not None:
            return 503, f"this generator is in quarantine: {here.quarantine}"
        if model is None:
            return 400, "the request names no model; name the policy to sample from"
        if model not in here.residency.serves:
            return 404, f"no policy {model!r} is served here; the base does not answer for it"
        return None

    @property
    def ready(self) -> bool:
        """Whether some policy can be sampled here."""
        here = self._swapper.instance
        return not self._draining and here.quarantine is None and bool(here.residency.serves)

    @contextmanager
    def sampling(self, policy: str) -> Iterator[str]:
        """A request for a policy that is served, until it has ended; what the engine calls the adapter it gets."""
        name = self._swapper.begin(policy)
        self._in_flight += 1
        try:
            yield name
        finally:
            self._in_flight -= 1
            self._swapper.end(name)
