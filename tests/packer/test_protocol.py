"""The wire messages: what may be said, by whom, and within which bounds. No sockets here."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import DIGEST, MESSAGES, NONCE

from packer_service.errors import ProtocolError
from packer_service.wire import handshake, protocol
from packer_service.wire.protocol import (
    Body,
    Challenge,
    Decoder,
    Export,
    Hello,
    Lease,
    MapChunk,
    Message,
    OutputReady,
    Piece,
    Refused,
    Release,
    Skeleton,
    Withdraw,
)

QUICK = settings(database=None, deadline=None, max_examples=300)

DECODERS = {decoder for decoder, _ in MESSAGES}


def names(values: list[Any]) -> list[str]:
    return [type(value[1]).__name__ for value in values]


def test_every_message_of_the_protocol_is_in_these_tests():
    assert {type(message) for _, message in MESSAGES} == set(Message.__subclasses__())


@pytest.mark.parametrize(("decoder", "message"), MESSAGES, ids=names(MESSAGES))
def test_a_message_arrives_as_it_was_sent(decoder, message):
    assert decoder(protocol.encode(message)) == message


@pytest.mark.parametrize(("decoder", "message"), MESSAGES, ids=names(MESSAGES))
def test_a_message_is_refused_from_a_peer_that_may_not_send_it(decoder, message):
    allowed = {one for one, other in MESSAGES if type(other) is type(message)}
    for forbidden in DECODERS - allowed:
        with pytest.raises(ProtocolError):
            forbidden(protocol.encode(message))


@QUICK
@given(st.sampled_from(sorted(DECODERS, key=id)), st.binary(max_size=300))
def test_arbitrary_bytes_are_a_protocol_error_or_a_message_and_nothing_else(decoder, data):
    try:
        assert isinstance(decoder(data), Message)
    except ProtocolError:
        pass


@QUICK
@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_a_protocol_error_or_a_message_and_nothing_else(case, data):
    decoder, message = case
    encoded = bytearray(protocol.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    encoded = encoded[: data.draw(st.integers(0, len(encoded)))]
    try:
        assert isinstance(decoder(bytes(encoded)), Message)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (protocol.from_worker, Export("output", 1, (Piece(0, 0, 0),))),
        (protocol.from_worker, Export("output", 1, (Piece(0, -1, 5),))),
        (protocol.from_worker, Export("output", 1, (Piece(0, 0, 1 << 63),))),
        (protocol.from_worker, Export("output", -1, ())),
        (protocol.from_worker, Export("", 1, ())),
        (protocol.from_worker, Export("x" * 129, 1, ())),
        (protocol.from_worker, Export("output", 1, (Piece(0, 0, 1),) * (protocol.MAX_PIECES + 1))),
        (protocol.from_worker, Export("output", 1, (), bytes(65))),
        (protocol.from_worker, MapChunk(0, 0)),
        (protocol.from_worker, Skeleton("output", Body(bytes(protocol.MAX_PAYLOAD_BYTES + 1), DIGEST))),
        (protocol.from_worker, Skeleton("output", Body(b"", DIGEST[:-1]))),
        (protocol.from_worker, Withdraw("output", "x" * 4097)),
        (protocol.from_engine, Release((-1,))),
        (protocol.from_engine, Release((1,) * (protocol.MAX_PIECES + 1))),
        (protocol.from_client, Hello(1, "worker", "short", NONCE, DIGEST)),
        (protocol.from_client, Hello(1, "worker", "s" * 65, NONCE, DIGEST)),
        (protocol.from_client, Hello(1, "somebody", "session-1", NONCE, DIGEST)),  # type: ignore[arg-type]
        (protocol.from_client, Hello(1, "worker", "session-1", NONCE[1:], DIGEST)),
        (protocol.to_engine, OutputReady("output", (Lease(0, 0, 0, 0),))),
    ],
    ids=lambda value: "" if isinstance(value, Decoder) else f"{type(value).__name__}",
)
def test_a_field_outside_its_bounds_is_refused(decoder, message):
    with pytest.raises(ProtocolError):
        decoder(protocol.encode(message))


def test_text_that_is_not_utf8_is_refused():
    encoded = protocol.encode(Withdraw("output")).replace(b"output", b"\xff\xfe\xfd\xfc\xfb\xfa")
    with pytest.raises(ProtocolError):
        protocol.from_worker(encoded)


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError):
        protocol.from_worker(b"\x91" * 60000 + b"\xc0")


def test_a_message_that_does_not_fit_a_datagram_is_refused_before_it_is_sent():
    with pytest.raises(ProtocolError, match=str(protocol.MAX_MESSAGE_BYTES)):
        protocol.encode(Refused("x" * (protocol.MAX_MESSAGE_BYTES + 1)))


def test_the_largest_output_fits_a_datagram():
    """1024 pieces of a pool of a terabyte after four billion leases, beside the largest payload and the longest name."""
    pieces, name, payload = protocol.MAX_PIECES, "x" * 128, bytes(protocol.MAX_PAYLOAD_BYTES)
    leases = tuple(Lease((1 << 32) - n, 250, (1 << 40) - n, (1 << 32) - n) for n in range(1, pieces + 1))
    ready = OutputReady(name, leases, Body(payload, DIGEST, 1 << 40, 1 << 20))
    assert protocol.to_engine(protocol.encode(ready)) == ready
    chunks = tuple(Piece((1 << 33) + n, (1 << 40) - n, (1 << 32) - n) for n in range(1, pieces + 1))
    export = Export(name, 1 << 40, chunks, bytes(64), tuple(piece.chunk for piece in chunks))
    assert protocol.from_worker(protocol.encode(export)) == export


def test_a_newer_peer_that_appended_fields_can_still_be_told_its_version():
    hello = msgspec.msgpack.decode(protocol.encode(Hello(99, "worker", "session-1", NONCE, DIGEST)))
    assert protocol.from_client(msgspec.msgpack.encode([*hello, "a field of version 99"])).version == 99


def test_a_proof_depends_on_everything_it_vouches_for():
    key, challenge = bytes(32), Challenge(1, NONCE)
    proofs = [
        handshake.client_proof(key, challenge, "worker", "session-1", NONCE),
        handshake.client_proof(b"another key", challenge, "worker", "session-1", NONCE),
        handshake.client_proof(key, Challenge(1, DIGEST), "worker", "session-1", NONCE),
        handshake.client_proof(key, challenge, "engine", "session-1", NONCE),
        handshake.client_proof(key, challenge, "worker", "session-2", NONCE),
        handshake.client_proof(key, challenge, "worker", "session-1", DIGEST),
        handshake.server_proof(key, challenge, NONCE),
        handshake.server_proof(key, challenge, DIGEST),
        handshake.server_proof(b"another key", challenge, NONCE),
        handshake.server_proof(key, Challenge(1, DIGEST), NONCE),
    ]
    assert len(set(proofs)) == len(proofs)
