"""One output on its way through the packer: what it holds, and the machine that its state is. It calls nothing that waits.

Note [The life of an output in the packer]
``Export`` comes first, from the worker's main thread: the pieces get regions of the engine's pool, the copies are submitted
behind the wait for the worker's signal, and a thread of the packer sleeps until they are over. Meanwhile the second message
comes: ``Skeleton``, or ``Withdraw``. An output that has both its messages is called *whole*. One that is whole and whose
copies are over is settled, by the thread that brought it there: OUTPUT_READY goes to the engine, and only after that send
is it acknowledged to the worker, so that an output is always in the worker's arena or in the engine's hands. From then on
its regions are the engine's leases. What failed is declined, and the worker sends it another way.

     Export                               Probe
       |                                    |
       v              SECOND                v
     QUEUED -------------------------> QUEUED_WHOLE
       |                                    |
       | SUBMITTED                          | SUBMITTED
       v              SECOND                v
     COPYING ------------------------> COPYING_WHOLE
       |                                    |
       | OVER                               | OVER
       v              SECOND                v           END (withdrawn, void, or a probe)
     COPIED -------------------------> DECIDING ---------------------------------------> ENDED
                                         | | |                                           ^ ^ ^
                                         | | `-- FAIL -----> FAILING ------- END --------' | |
                                         | `---- PUBLISH --> PUBLISHING ---- END ----------' |
                                         |                      |                            |
                                         |                      | DECLINE                    |
                                         |                      v                            |
                                         `------ DECLINE --> DECLINED ------ END ------------'

An Export without pieces begins COPIED. Where no copy can be made, OVER leads from QUEUED to COPIED and from QUEUED_WHOLE to
DECIDING. When the worker is gone, END leads from QUEUED, QUEUED_WHOLE and COPIED to ENDED. A plain skeleton goes to the
engine while its output is copied (OUTPUT_COMING): ``coming``. If that does not come after all, it is taken back (OUTPUT_GONE).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto

from packer_service.devices.base import Marker
from packer_service.pool.pool import Region
from packer_service.stats import Cause
from packer_service.wire.protocol import Export, Lease, Probe, Skeleton, Withdraw


class State(Enum):
    """Where an output is. See Note [The life of an output in the packer]."""

    QUEUED = auto()  # ``regions`` may be some of those it needs; ``marker`` is None
    QUEUED_WHOLE = auto()
    COPYING = auto()  # ``marker`` is set, and there is a region for each piece
    COPYING_WHOLE = auto()
    COPIED = auto()  # nothing is copied for it any more; ``failure`` says why its bytes are not right, if they are not
    DECIDING = auto()  # the thread that brought it here decides what it comes to, alone; ``second`` is set
    PUBLISHING = auto()  # ``regions`` are leases; until OUTPUT_READY is sent and the worker's ack is under way
    FAILING = auto()  # it holds nothing more; until the engine is told why and the worker's ack is under way
    DECLINED = auto()  # it holds nothing more; until the nack is sent to a worker that lives
    ENDED = auto()  # it holds nothing more and is no longer in the table


class Event(Enum):
    SUBMITTED = auto()  # its copies are
    OVER = auto()  # its copies ended, or will never be made
    SECOND = auto()  # its second message is here
    PUBLISH = auto()
    FAIL = auto()
    DECLINE = auto()
    END = auto()


_S, _E = State, Event
TRANSITIONS: dict[State, dict[Event, State]] = {
    _S.QUEUED: {_E.SUBMITTED: _S.COPYING, _E.OVER: _S.COPIED, _E.SECOND: _S.QUEUED_WHOLE, _E.END: _S.ENDED},
    _S.QUEUED_WHOLE: {_E.SUBMITTED: _S.COPYING_WHOLE, _E.OVER: _S.DECIDING, _E.END: _S.ENDED},
    _S.COPYING: {_E.OVER: _S.COPIED, _E.SECOND: _S.COPYING_WHOLE},
    _S.COPYING_WHOLE: {_E.OVER: _S.DECIDING},
    _S.COPIED: {_E.SECOND: _S.DECIDING, _E.END: _S.ENDED},
    _S.DECIDING: {_E.PUBLISH: _S.PUBLISHING, _E.FAIL: _S.FAILING, _E.DECLINE: _S.DECLINED, _E.END: _S.ENDED},
    _S.PUBLISHING: {_E.DECLINE: _S.DECLINED, _E.END: _S.ENDED},
    _S.FAILING: {_E.END: _S.ENDED},
    _S.DECLINED: {_E.END: _S.ENDED},
    _S.ENDED: {},
}

UNSUBMITTED = (State.QUEUED, State.QUEUED_WHOLE)
COPYING = (State.COPYING, State.COPYING_WHOLE)
UNCOPIED = (*UNSUBMITTED, *COPYING)
UNDECIDED = (*UNCOPIED, State.COPIED)


class ImpossibleTransition(RuntimeError):
    """A defect of this packer's. The session in which it shows ends, and its worker exports elsewhere what it still has."""


@dataclass(eq=False)
class Output:
    """One output. Whoever submits it writes ``regions`` and ``marker``, the reader ``second`` and ``host_fd``, whoever tells
    the engine ``coming``; from DECIDING on all of it is the deciding thread's. See ``on`` for ``state``."""

    export: Export
    second: Skeleton | Withdraw | Probe | None = None
    state: State = field(init=False)
    regions: list[Region] = field(default_factory=list)
    marker: Marker | None = None  # the end of its copies, once they are submitted
    host_fd: int | None = None  # of its skeleton
    coming: int = 0  # the first lease of what the engine was told is coming; 0 where it was not
    failure: str = ""  # why its bytes will never be right
    cause: Cause = Cause.OTHER  # of the failure, in a word
    exported_at: float = field(default_factory=time.perf_counter)
    began_at: float = 0.0  # its copies, as the thread that waits for them saw it
    copied_at: float = 0.0

    def __post_init__(self) -> None:
        queued = State.QUEUED if self.second is None else State.QUEUED_WHOLE
        self.state = queued if self.export.pieces else State.COPIED

    @property
    def id(self) -> str:
        return self.export.output

    def on(self, event: Event) -> State:
        """The state that follows. With the lock held, where another thread may move it too."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise ImpossibleTransition(f"output {self.id} is {self.state.name}, and {event.name} cannot follow on that")
        self.state = state
        return state

    def take_second(self, message: Skeleton | Withdraw) -> State:
        """Its second message; or in the place of that, while the output is not settled, that it will never be complete."""
        was_whole, self.second = self.second is not None, message
        return self.state if was_whole else self.on(Event.SECOND)

    def fail(self, reason: str, cause: Cause) -> None:
        """The first reason stays. None is given where there is none."""
        if reason and not self.failure:
            self.failure, self.cause = reason, cause

    def leases(self) -> tuple[Lease, ...]:
        """What its regions are to the engine."""
        return tuple(Lease(r.number, r.segment.number, r.offset, r.nbytes) for r in self.regions)

    def describe(self, counter: int) -> str:
        """For a person, before it settles."""
        if self.state is State.COPIED:
            text = f"failed ({self.failure})" if self.failure else "copied"
        elif len(self.regions) < len(self.export.pieces):
            text = "waiting for room in the pool"
        elif self.export.ready > counter:
            text = "waiting for the worker's forward"
        else:
            text = "copying"
        return text if self.second is not None else f"{text}, and its worker has not sent its skeleton"


class Outputs(dict[str, Output]):
    """The outputs of one worker by id, in the order of their exports, until they end.

    ``lock`` guards the table and what is said in ``Output``; it is held for bookkeeping alone: for no call to the device or
    the pool, and for no send.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def within(self, states: tuple[State, ...]) -> list[Output]:
        """Those in one of ``states``. The lock is held."""
        return [output for output in self.values() if output.state in states]

    def incomplete(self, completed: int) -> list[Output]:
        """Those that the worker's device, which ``completed`` so much, has not finished. The lock is held."""
        return [output for output in self.within(UNCOPIED) if output.export.ready > completed]

    def end(self, output: Output) -> None:
        with self.lock:
            output.on(Event.END)
            del self[output.id]
