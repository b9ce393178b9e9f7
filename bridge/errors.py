"""One tree of errors. Each names the boundary that failed and what to do next; each has a documented exit code.

Exit codes of every command:

== ==========================================================
0  done, or the answer is yes
1  the answer is no (an audit that refutes, a run that failed)
2  usage or configuration
3  Redis or Valkey
4  the adapter store
5  a generator (vLLM server) or its plugin
6  an adapter or a model that cannot be used
7  the ledger
8  this process differs from the run it wants to join
9  the machine: a port, the disk, a process that died
10 bytes from another process that cannot be read
130 interrupted by Ctrl-C (`up` and `demo` also say so after SIGTERM)
137 vLLM, or its engine, was killed or died under ``serve``: start it again, as `up` and `demo` do
143 ended by SIGTERM, with nothing to finish or without having finished it; see ``lorabridge.bridge.stopping``
== ==========================================================
"""

from __future__ import annotations


class BridgeError(Exception):
    """A failure with a boundary, a problem in one sentence, and the next action.

    Attributes:
        boundary: what failed, in the user's words ("the adapter store").
        exit_code: what a command exits with.
    """

    boundary = "lorabridge"
    exit_code = 1

    def __init__(self, problem: str, *, action: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.action = action

    def diagnostics(self) -> str:
        """One line for people: boundary, problem, next action."""
        return f"{self.boundary}: {self.problem.rstrip('.')}. {self.action}"


class AnswerNo(BridgeError):
    """A command that answers a question found the answer to be no."""

    boundary = "the answer is no"
    exit_code = 1


class ConfigError(BridgeError):
    boundary = "configuration"
    exit_code = 2


class StreamError(BridgeError):
    boundary = "Redis"
    exit_code = 3


class StreamUnreachable(StreamError):
    """Nothing answers at the URL, or it stopped answering for longer than the outage allowed."""


class StreamRefused(StreamError):
    """The server answers and refuses: password, ACL, a command it does not have."""


class StoreError(BridgeError):
    boundary = "adapter store"
    exit_code = 4


class DigestMissing(StoreError):
    """No adapter with that digest is in the store."""


class DigestMismatch(StoreError):
    """The bytes in the store are not those the digest names: corrupt, cut short or tampered with."""


class TooLarge(StoreError):
    """More bytes than the configured limit; nothing of it was parsed."""


class VersionTaken(StoreError):
    """That version of the policy exists with other content."""


class StaleTrainer(StoreError):
    """A newer trainer has taken over the policy; this one may not commit."""


class HeadConflict(StoreError):
    """Redis names a version that the store does not have, or the same version with another digest."""


class GeneratorError(BridgeError):
    boundary = "generator"
    exit_code = 5


class GeneratorUnreachable(GeneratorError):
    """The vLLM server does not answer."""


class EngineDied(GeneratorError):
    """vLLM's engine was killed or died; starting it again may help, as with any process that a signal has ended."""

    exit_code = 137


class PluginMissing(GeneratorError):
    """A vLLM server answers, but without the lorabridge plugin or its control door."""


class TokenRefused(GeneratorError):
    """The control token is wrong or missing."""


class NotServed(GeneratorError):
    """The generator does not serve the policy: it has restarted, or the policy was taken out."""


class RequestRefused(GeneratorError):
    """The generator cannot sample this request, and would not at another try."""


class SwapFailed(GeneratorError):
    """The adapter was not put into the slot; what is served is as before, or nothing."""


class SlotsBusy(SwapFailed):
    """There is no slot for the adapter until samples in flight have ended; nothing was changed."""


class Quarantined(GeneratorError):
    """The generator could not prove what it serves and refuses to sample."""


class AdapterError(BridgeError):
    boundary = "adapter"
    exit_code = 6


class AdapterUnservable(AdapterError):
    """vLLM cannot serve this adapter, or would serve it wrong."""


class AdapterCorrupt(AdapterError):
    """Not a readable adapter: truncated file, bad header, bad configuration."""


class ModelError(BridgeError):
    """The base model's folder is missing or unreadable."""

    boundary = "base model"
    exit_code = 6


class LedgerError(BridgeError):
    boundary = "ledger"
    exit_code = 7


class LedgerCorrupt(LedgerError):
    """A file of the ledger is missing, cut short or changed."""


class LedgerTaken(LedgerError):
    """Another archiver writes this ledger."""


class RolloutsFailed(BridgeError):
    """Group after group could not be sampled or rewarded."""

    boundary = "rollouts"
    exit_code = 1


class RunMismatch(BridgeError):
    """This worker or generator differs from the run that the trainer published."""

    boundary = "run"
    exit_code = 8


class MachineError(BridgeError):
    boundary = "machine"
    exit_code = 9


class PortTaken(MachineError):
    """Another process listens there."""


class DiskFull(MachineError):
    """A write did not fit; nothing half-written was left under a final name."""


class ProcessDied(MachineError):
    """A process of the run ended before it should have."""


class CodecError(BridgeError):
    """Bytes from another process that are not what they should be."""

    boundary = "wire"
    exit_code = 10


class SchemaUnknown(CodecError):
    """A record of a schema version that this release does not read."""
