"""How far a packer is with an output: asked on any thread, answered on the one that receives."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from packer_service.wire.protocol import Describe, Described
from worker_shim.connection import Connection

_NO_ANSWER = "unknown: the packer did not answer"


class Questions:
    """Those to one packer, over one connection. ``_answered`` guards ``_states`` and ``overdue``."""

    def __init__(self, connection: Connection) -> None:
        self.overdue = False  # an answer did not come in time, and none has since
        self._connection = connection
        self._answered = threading.Condition()
        self._states: dict[str, str] = {}  # of outputs that were asked about; empty: no answer yet

    def ask(self, output_id: str) -> Callable[[float], str]:
        """What this returns waits for the answer, until a time of ``time.monotonic()``. Any thread but the one that receives.

        While an earlier answer is overdue nothing is asked: whoever looks into many outputs waits for a packer once.
        """
        with self._answered:
            if self.overdue:
                return lambda deadline: _NO_ANSWER
            self._states[output_id] = ""
        self._connection.post(Describe(output_id))
        return functools.partial(self._wait, output_id)

    def _wait(self, output_id: str, deadline: float) -> str:
        with self._answered:
            timeout_s = max(deadline - time.monotonic(), 0.0)
            self.overdue = not self._answered.wait_for(lambda: self._states.get(output_id, ""), timeout_s)
            return self._states.pop(output_id, "") or _NO_ANSWER

    def take_answer(self, message: Described) -> None:
        """For the thread that receives."""
        with self._answered:
            self.overdue = False
            if message.output in self._states:
                self._states[message.output] = message.state
                self._answered.notify_all()
