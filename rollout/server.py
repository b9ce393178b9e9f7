"""A vLLM server as ``lorabridge serve`` keeps it: started, waited for, and ended as ``bridge.stopping`` promises.

vLLM by itself does not keep that promise: it does not hear SIGTERM while its engine loads, answers Ctrl-C with a
traceback while it imports, logs one when it ends after any request, and leaves its engine if it is killed. So it runs
behind a guard, ``serve`` stays, and the end is always the same: no new requests, those in flight finish, all is killed.

============================ ===================================================== ====================================
what happens                 what ``serve`` does                                   exit code
============================ ===================================================== ====================================
a signal while vLLM starts   kills it at once: nobody can have asked it for        143, 130
                             anything yet
a signal after that          has it refuse new requests, waits for those in        0
                             flight for up to ``PATIENCE_S``, kills it
that is not enough, or it    kills it all the same                                 143, 130
does not answer
vLLM ends, or is killed      clears away what it left                              vLLM's; 137 if it was killed, or
                                                                                   its engine was, where it says 0
``serve`` itself is killed   nothing; the guard sends SIGTERM, and kills 5 s later
============================ ===================================================== ====================================
"""

from __future__ import annotations

import asyncio
import os
import time
from tempfile import TemporaryDirectory

from lorabridge.bridge.errors import EngineDied, GeneratorError
from lorabridge.bridge.run.guard import TRACKERS_S, adopt_orphans, clear
from lorabridge.bridge.run.processes import Guarded
from lorabridge.bridge.sections import GeneratorsSection
from lorabridge.bridge.stopping import DRAIN_S, Drain
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.serve import Command, in_folder, with_environment

PATIENCE_S = DRAIN_S - TRACKERS_S
_TICK_S = 0.2
_SETTLE_S = 0.5


def run(command: Command, section: GeneratorsSection, token: str) -> int:
    """Run vLLM until it ends or this process is asked to; nothing of it is left then. In the main thread only.

    Its output goes where that of this process does.

    Args:
        command: that starts it.
        section: its doors.
        token: of its control door.

    Returns:
        The exit code, see above.

    Raises:
        EngineDied: nobody asked vLLM to end, and it says that all is well, as it does then.
    """
    adopt_orphans()  # of a guard that is killed, too
    with Drain() as drain, TemporaryDirectory(prefix="lorabridge-") as folder:
        server = Guarded(command.arguments, with_environment(in_folder(command, folder), os.environ))
        while (code := server.code) is None and not drain.asked():
            time.sleep(_TICK_S)
        ended_by_itself = code is not None
        if code is None:
            code = 0 if asyncio.run(_drained(section, token)) else drain.code
        clear(0)
    if ended_by_itself and code == 0:
        raise EngineDied("vLLM's engine has died, or was killed", action="Its last lines say why; start it again")
    return code


async def _drained(section: GeneratorsSection, token: str) -> bool:
    """Have the server refuse new requests; whether those in flight end in time."""
    try:
        async with asyncio.timeout(PATIENCE_S), Generator(*section.doors(0), token, 1) as generator:
            if await generator.drain():
                while await generator.drain():  # noqa: ASYNC110
                    await asyncio.sleep(_TICK_S)
                await asyncio.sleep(_SETTLE_S)  # who has an answer asks what it was sampled from
    except (GeneratorError, TimeoutError):
        return False
    return True
