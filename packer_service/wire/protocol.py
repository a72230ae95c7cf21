"""The messages on the wire, typed and versioned. Nothing else in the project knows their bytes.

One message is one datagram of an AF_UNIX SOCK_SEQPACKET connection, msgpack inside, with the file descriptors that
belong to it attached. ``VERSION`` changes whenever a message does; ``Challenge`` and ``Hello`` keep their first field for
ever, so that peers of different versions can tell each other so.

    worker                      packer                       engine
      |-- Hello / Welcome ------->|<------- Hello / Welcome -----|
      |-- MapTimeline +fd ------->|-- MapSegment +fd -------------->|   at the start, when the pool grows, and after SegmentLost
      |-- MapAcks +fd ----------->|                              |   at the start
      |-- MapChunk -------------->|                              |   when the arena grows
      |-- Export ---------------->|                              |   main thread: the device copy may start
      |-- Skeleton (+fd) -------->|-- OutputComing (+fd) ------->|   what the output looks like
      |<------------ Ack or Nack--|-- OutputReady (+fd) -------->|   it is on the host; most acks go to the ack page
      |                           |<------------------ Release --|   when the tensors die
      |-- Ping / Pong ----------->|<----------------- Ping / Pong --|   where nothing else was heard for a while
      |<----------------- Leaving-|-- Leaving ------------------>|   before it ends, where somebody asked it to
      |<-- Pause / Paused ------->|                              |   an operator switches it off and on

    operator                    packer      (packer_service.sessions.operator)
      |-- Hello / Welcome ------->|
      |-- GetStatus / StatusIs -->|
      |-- SetPaused / PauseIs --->|   passed on to workers as Pause; answered once they said Paused
      |-- Drain / DrainIs ------->|   answered now and again, and a last time before the packer ends
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from packer_service.errors import ProtocolError

VERSION = 7
MAX_MESSAGE_BYTES = 64 << 10
MAX_FDS = 1
MAX_PIECES = 1024
MAX_PAYLOAD_BYTES = 32 << 10
MAX_STATUS_BYTES = 60 << 10

OutputId = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Handle = Annotated[bytes, Meta(max_length=64)]
Payload = Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]
Number = Annotated[int, Meta(ge=0, le=(1 << 62))]
Count = Annotated[int, Meta(ge=1, le=(1 << 62))]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything on the wire."""


class Challenge(Message, frozen=True):
    """Packer to anyone who connects: prove that you have the key."""

    version: int
    nonce: Nonce


class Hello(Message, frozen=True):
    """The answer: who I am, and the proof. ``session`` is the engine's; its workers join it. An operator's names nothing."""

    version: int
    role: Literal["engine", "worker", "operator"]
    session: Annotated[str, Meta(min_length=8, max_length=64)]
    nonce: Nonce
    proof: Digest
    device_uuid: Text = ""
    pid: Number = 0  # as the peer sees it


class Welcome(Message, frozen=True):
    """The packer's own proof, and what it serves."""

    proof: Digest
    device_kind: str
    device_uuid: str
    device_name: str
    pid: int


class Refused(Message, frozen=True):
    """No: ``reason`` is a sentence for a person. ``for_now``: it may pass by itself."""

    reason: Text
    for_now: bool = False


class MapTimeline(Message, frozen=True):
    """Worker to packer, with the memfd of its timeline page (see ``packer_service.memory.timeline``).

    ``generation`` numbers this worker's connections: what came through an earlier one is void.
    """

    generation: Number = 0


class MapAcks(Message, frozen=True):
    """Worker to packer, with the memfd of this connection's ack page (see ``packer_service.memory.ack_page``)."""


class MapChunk(Message, frozen=True):
    """Worker to packer: import one chunk of the arena. ``handle`` is a CUDA IPC handle; a host chunk is the attached memfd."""

    chunk: Number
    nbytes: Count
    handle: Handle = b""


class UnmapChunk(Message, frozen=True):
    """Worker to packer: close that import; the worker frees the chunk when ``ChunkUnmapped`` comes."""

    chunk: Number


class ChunkUnmapped(Message, frozen=True):
    chunk: Number


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One range of one arena chunk: ``nbytes`` at ``offset``."""

    chunk: Number
    offset: Number
    nbytes: Count


class Export(Message, frozen=True):
    """Worker to packer: copy these once the timeline has reached ``ready`` (or once the CUDA IPC ``event`` is done).

    ``close``: chunks mapped for this output alone; the packer closes its imports of them before it answers.
    """

    output: OutputId
    ready: Number
    pieces: Annotated[tuple[Piece, ...], Meta(max_length=MAX_PIECES)]
    event: Handle = b""
    close: Annotated[tuple[Number, ...], Meta(max_length=MAX_PIECES)] = ()


class Body(msgspec.Struct, frozen=True, array_like=True):
    """What the engine needs to rebuild an output; opaque to the packer.

    With ``host_nbytes``, a memfd of the worker's is attached to the message; the last ``payload_in_host`` bytes of it are
    the payload, where that was too large for a message.
    """

    payload: Payload
    mac: Digest
    host_nbytes: Number = 0
    payload_in_host: Number = 0


class Skeleton(Message, frozen=True):
    """Worker to packer: what an output is beside its pieces. ``plain``: putting it together reads none of its arrays."""

    output: OutputId
    body: Body
    plain: bool = False


class Withdraw(Message, frozen=True):
    """Worker to packer: forget this output; it will never be ready, or went another way. ``error`` reaches the engine.

    ``incomplete``: the worker's device broke and will never complete it, so nothing may wait for that.
    """

    output: OutputId
    error: Text = ""
    incomplete: bool = False


class Ping(Message, frozen=True):
    """To the packer: are you there? Answered by ``Pong``."""


class Pong(Message, frozen=True):
    pass


class Probe(Message, frozen=True):
    """Worker to packer at the start: can you wait for my marker and read my memory? Answered by ``Probed``."""

    ready: Number
    piece: Piece
    event: Handle = b""


class Probed(Message, frozen=True):
    """SHA-256 of the bytes the packer read, or why it could not."""

    digest: bytes = b""
    error: Text = ""


class Ack(Message, frozen=True):
    """Packer to worker: the engine has this output; what it held is yours again. Where slots are all that, see ``MapAcks``."""

    output: OutputId


class Nack(Message, frozen=True):
    """Packer to worker: this output cannot go this way; the slots are yours again."""

    output: OutputId
    reason: Text


class MapSegment(Message, frozen=True):
    """Packer to engine, with the memfd: one segment of the pool, yours alone."""

    segment: Number
    nbytes: Count


class UnmapSegment(Message, frozen=True):
    """Packer to engine: this segment is empty and leaves the pool; unmap it, so that its pages go back to the system."""

    segment: Number


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One region of one segment, the engine's until it sends ``Release``."""

    lease: Number
    segment: Number
    offset: Number
    nbytes: Count


class SegmentLost(Message, frozen=True):
    """Engine to packer: the memfd of this segment could not be taken; send it again."""

    segment: Number


class OutputComing(Message, frozen=True):
    """Packer to engine: this output is being copied into what will be these leases; put it together meanwhile.

    One lease at least, for each piece one, in order. The leases are the engine's with the OutputReady that names them, or
    never: see ``OutputGone``.
    """

    output: OutputId
    leases: Annotated[tuple[Lease, ...], Meta(min_length=1, max_length=MAX_PIECES)]
    body: Body


class OutputGone(Message, frozen=True):
    """Packer to engine: forget the output that was coming into ``lease``, its first."""

    lease: Number


class OutputReady(Message, frozen=True):
    """Packer to engine: one lease for each piece, in order. Or an error. With neither body nor error: it was coming."""

    output: OutputId
    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_PIECES)] = ()
    body: Body | None = None
    error: Text = ""


class WorkerGone(Message, frozen=True):
    """Packer to engine: a worker of yours ended, and everything it had exported was published or failed before this."""


class Describe(Message, frozen=True):
    """Engine to packer: how far is this output? For a person who looks into a request that waits. Answered by ``Described``."""

    output: OutputId


class Described(Message, frozen=True):
    output: OutputId
    state: Text


class Release(Message, frozen=True):
    """Engine to packer: these leases are yours again."""

    leases: Annotated[tuple[Number, ...], Meta(max_length=MAX_PIECES)]


class Leaving(Message, frozen=True):
    """Packer to worker and engine: I end soon and nobody starts me again at once: bring new outputs another way."""

    reason: Text


class Pause(Message, frozen=True):
    """Packer to worker: export nothing more (``paused``), or export again. Answered by ``Paused``."""

    paused: bool


class Paused(Message, frozen=True):
    """Worker to packer: whether an operator paused it. A worker that is paused says so on every new connection."""

    paused: bool


class GetStatus(Message, frozen=True):
    """Operator to packer: how are you? Answered by ``StatusIs``."""


class StatusIs(Message, frozen=True):
    """``packer_service.status.Status`` as JSON."""

    status: Annotated[bytes, Meta(max_length=MAX_STATUS_BYTES)]


class SetPaused(Message, frozen=True):
    """Operator to packer: pause the workers of one engine (whose session begins with ``session``), or of all. Answered by
    ``PauseIs`` once all of them have answered, or after ``timeout_s``."""

    paused: bool
    session: Text = ""
    timeout_s: Seconds = 5.0


class PauseIs(Message, frozen=True):
    """How many workers were asked, and how many of them have answered that it is so."""

    asked: Number
    answered: Number


class Drain(Message, frozen=True):
    """Operator to packer: take no more, finish what is in flight for up to ``timeout_s``, and exit."""

    timeout_s: Seconds = 30.0


class DrainIs(Message, frozen=True):
    """So many outputs are still in flight. ``ended``: the packer ends now."""

    in_flight: Number
    ended: bool = False


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The message's bytes. ProtocolError where they do not fit a datagram."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(data)} bytes exceeds the {MAX_MESSAGE_BYTES} of a message"
        )
    return data


class Decoder:
    """Bytes to one of the messages allowed from one kind of peer."""

    def __init__(self, allowed: object) -> None:
        self._decode = msgspec.msgpack.Decoder(allowed).decode

    def __call__(self, data: bytes) -> Message:
        try:
            return self._decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            # What the peer sent may be part of the error: neither its length nor its line breaks belong into a log.
            why = repr(str(error)[:200])
            raise ProtocolError(f"{len(data)} bytes from a peer are no message allowed here: {why}") from error


from_client = Decoder(Hello)
from_server = Decoder(Challenge | Welcome | Refused)
from_worker = Decoder(
    MapTimeline | MapAcks | MapChunk | UnmapChunk | Export | Skeleton | Withdraw | Probe | Paused | Ping
)
to_worker = Decoder(Ack | Nack | Probed | ChunkUnmapped | Leaving | Pause | Refused | Pong)
from_engine = Decoder(Release | Describe | SegmentLost | Ping)
to_engine = Decoder(
    MapSegment
    | UnmapSegment
    | OutputComing
    | OutputGone
    | OutputReady
    | WorkerGone
    | Described
    | Leaving
    | Refused
    | Pong
)
from_operator = Decoder(GetStatus | SetPaused | Drain | Ping)
to_operator = Decoder(StatusIs | PauseIs | DrainIs | Refused | Pong)
from_role = {"engine": from_engine, "worker": from_worker, "operator": from_operator}
to_role = {"engine": to_engine, "worker": to_worker, "operator": to_operator}
