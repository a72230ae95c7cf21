"""One output between ``_return_result`` and its end: what it holds, and its state machine.

    NEW --CLONE--> BESIDE
     |               |
     +----EXPORT-----+
             v
         EXPORTED ----SUBMIT----> SUBMITTED
          |     |                     |
      WITHDRAW  +--------LOSE---------+
          v                v
      WITHDRAWN           LOST
          |                |
         LOSE           WITHDRAW
          +---> DROPPED <--+

    WITHDRAW    leads from NEW and BESIDE to DONE
    ACK         leads from SUBMITTED, LOST, WITHDRAWN and DROPPED to DONE
    FALL_BACK   leads from WITHDRAWN and DROPPED to DONE, from BESIDE, EXPORTED, SUBMITTED and LOST to FALLING_BACK
    SETTLE      leads from DONE and FALLING_BACK to SETTLED

In EXPORTED, SUBMITTED, WITHDRAWN, LOST and DROPPED it is in ``Exchange.pending``: whichever packer is there must be told of it.
Its memory is its own from NEW on, and once it was exported it is given back in SETTLED, and nowhere before.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from packer_service.memory.memfd import SharedMemory
from packer_service.wire.protocol import Export, Message, Piece, Skeleton, Withdraw
from worker_shim.outputs.arrays import Place
from worker_shim.outputs.own_path import OwnPathReason
from worker_shim.worker.arena import Slot
from worker_shim.worker.device import Signal


class State(enum.Enum):
    NEW = "new"  # the main thread finds memory for it; no packer has heard of it
    BESIDE = "beside"  # clones beside the full arena hold it until slots come back; no packer has heard of it
    EXPORTED = "exported"  # the packer, or the next one, copies it and waits for the rest of it
    SUBMITTED = "submitted"  # the packer, or the next one, is told everything, and will answer
    WITHDRAWN = "withdrawn"  # nobody waits for it; the packer will say when it has let go of its memory
    LOST = "lost"  # the device will never complete it: the packer was told so, and tells the engine
    DROPPED = "dropped"  # withdrawn and lost: the packer was told not to wait for the device
    FALLING_BACK = "falling back"  # it takes vllm-omni's own path, out of the memory that it holds
    DONE = "done"  # nobody reads its memory any more
    SETTLED = "settled"  # it holds nothing; ``on_settled`` is called, if it is ``counted``


class Event(enum.Enum):
    CLONE = "clone"  # the arena is full
    EXPORT = "export"
    SUBMIT = "submit"
    WITHDRAW = "withdraw"
    LOSE = "lose"  # the device broke before it was complete
    ACK = "ack"
    FALL_BACK = "fall back"  # the packer declined it, is gone, or nothing is free for it
    SETTLE = "settle"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.CLONE): State.BESIDE,
    (State.NEW, Event.EXPORT): State.EXPORTED,
    (State.NEW, Event.WITHDRAW): State.DONE,
    (State.BESIDE, Event.EXPORT): State.EXPORTED,
    (State.BESIDE, Event.WITHDRAW): State.DONE,
    (State.BESIDE, Event.FALL_BACK): State.FALLING_BACK,
    (State.EXPORTED, Event.SUBMIT): State.SUBMITTED,
    (State.EXPORTED, Event.WITHDRAW): State.WITHDRAWN,
    (State.EXPORTED, Event.LOSE): State.LOST,
    (State.EXPORTED, Event.FALL_BACK): State.FALLING_BACK,
    (State.SUBMITTED, Event.ACK): State.DONE,
    (State.SUBMITTED, Event.LOSE): State.LOST,
    (State.SUBMITTED, Event.FALL_BACK): State.FALLING_BACK,
    (State.WITHDRAWN, Event.ACK): State.DONE,
    (State.WITHDRAWN, Event.LOSE): State.DROPPED,
    (State.WITHDRAWN, Event.FALL_BACK): State.DONE,
    (State.LOST, Event.WITHDRAW): State.DROPPED,
    (State.LOST, Event.ACK): State.DONE,
    (State.LOST, Event.FALL_BACK): State.FALLING_BACK,
    (State.DROPPED, Event.ACK): State.DONE,
    (State.DROPPED, Event.FALL_BACK): State.DONE,
    (State.FALLING_BACK, Event.SETTLE): State.SETTLED,
    (State.DONE, Event.SETTLE): State.SETTLED,
}

NO_SIGNAL = Signal(0)


@dataclass(eq=False)
class InFlight:
    """One output. The link's lock guards ``state``; the thread that has the output at the time writes the rest.

    ``content`` and ``arrays`` are there until it is pickled, and ``skeleton`` from then on.
    """

    output_id: str
    content: object
    arrays: list[tuple[torch.Tensor, Place]]
    plain: bool = False  # see survey.Survey
    yielding: frozenset[type] = frozenset()
    state: State = State.NEW
    counted: bool = True  # ``on_settled`` is to be told of its end
    slots: list[Slot] = field(default_factory=list)  # one a piece, where they are in the arena
    beside: list[torch.Tensor] = field(default_factory=list)  # where they are not: flat uint8, one a piece
    overflow_bytes: int = 0  # of the pieces that are clones
    host: SharedMemory | None = None  # its host arrays, and a pickle too large for a message
    signal: Signal = NO_SIGNAL
    pieces: tuple[Piece, ...] = ()  # as the packer reads them; empty while they are clones
    imports: tuple[int, ...] = ()  # numbers of the allocations that the packer imports for this output alone
    skeleton: Skeleton | None = None
    error: str = ""  # why it is lost
    own_path: OwnPathReason = OwnPathReason.OTHER  # why it falls back

    def allows(self, event: Event) -> bool:
        return (self.state, event) in TRANSITIONS

    def on(self, event: Event) -> None:
        """Change the state. What the table does not have is a defect of ours."""
        state = TRANSITIONS.get((self.state, event))
        assert state is not None, f"output {self.output_id} is {self.state.value}: it cannot {event.value}"
        self.state = state

    def view(self, piece: int) -> torch.Tensor:
        """The bytes of a piece, flat uint8."""
        return self.slots[piece].view if self.slots else self.beside[piece]

    @property
    def export(self) -> Export:
        return Export(self.output_id, self.signal.ready, self.pieces, self.signal.event, self.imports)

    def packets(self) -> Iterator[tuple[Message, int | None]]:
        """Everything that a packer must be told of it, in order, with the descriptor that goes with each message."""
        yield self.export, None
        if self.state is not State.EXPORTED:
            yield self.last_packet

    @property
    def last_packet(self) -> tuple[Message, int | None]:
        """The second message, as its state has it."""
        if self.state is State.SUBMITTED:
            assert self.skeleton is not None
            return self.skeleton, None if self.host is None else self.host.fd
        return Withdraw(self.output_id, self.error, self.state is not State.WITHDRAWN), None
