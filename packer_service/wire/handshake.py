"""How two processes prove to each other that they know the key, before anything else is said.

packer                    client (an engine, a worker or an operator)
  |-- Challenge ----------->|
  |<------------- Hello ----|   the client's proof
  |-- Welcome or Refused -->|   the packer's own
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable
from typing import cast

from packer_service.errors import HandshakeError, NotNow, PackerAbsent, PackerUnavailable, PeerClosed, ProtocolError
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, bound_sends, close_fds, peer_credentials
from packer_service.wire.protocol import Challenge, Hello, Message, Refused, Welcome


def client_proof(key: bytes, challenge: Challenge, role: str, session: str, nonce: bytes) -> bytes:
    """What a client that knows ``key`` answers to ``challenge``."""
    fields = (b"client", str(protocol.VERSION).encode(), role.encode(), session.encode(), challenge.nonce, nonce)
    return hmac.digest(key, b"".join(len(field).to_bytes(2, "big") + field for field in fields), hashlib.sha256)


def server_proof(key: bytes, challenge: Challenge, nonce: bytes) -> bytes:
    """What a packer that knows ``key`` answers to a client's ``nonce``."""
    return hmac.digest(key, b"server" + nonce + challenge.nonce, hashlib.sha256)


def _expect(channel: Channel, timeout_s: float, *kinds: type[Message]) -> Message:
    received = channel.receive(timeout_s)
    if received is None:
        raise NotNow("the peer stayed silent during the handshake")
    message, fds = received
    close_fds(fds)
    if not isinstance(message, kinds):
        raise HandshakeError(f"a {type(message).__name__} came during the handshake")
    return message


def accept(
    sock: socket.socket,
    key: bytes,
    uids: frozenset[int],
    admit: Callable[[Hello, bytes], Welcome],
    timeout_s: float,
    *,
    operator_key: bytes = b"",
) -> tuple[Channel, Hello]:
    """The packer's side of the handshake, on a thread of its own. Closes ``sock`` when it raises.

    ``admit`` makes the Welcome from the peer's Hello and our proof, or refuses it with a HandshakeError. A peer that is
    refused is told why, except one whose uid is not on the list or that does not speak the protocol. An operator may prove
    ``operator_key`` in the key's stead, which opens nothing else.
    """
    channel = Channel(sock, protocol.from_client)
    try:
        bound_sends(sock, timeout_s)
        _, uid = peer_credentials(sock)
        if uid not in uids:
            raise HandshakeError(f"uid {uid} is not allowed to connect: add it to the setting allowed_uids")
        challenge = Challenge(protocol.VERSION, os.urandom(32))
        channel.send(challenge)
        hello = cast(Hello, _expect(channel, timeout_s, Hello))
        try:
            if hello.version != protocol.VERSION:
                raise HandshakeError(
                    f"this packer speaks protocol {protocol.VERSION}, the peer {hello.version}:"
                    " run the same release on both sides"
                )
            keys = [key, operator_key] if hello.role == "operator" and operator_key else [key]
            proven = [each for each in keys if _proves(each, challenge, hello)]
            if not proven:
                raise HandshakeError(
                    "the key is not this packer's: give both sides the same file in the setting key_file"
                )
            welcome = admit(hello, server_proof(proven[0], challenge, hello.nonce))
        except HandshakeError as error:
            channel.send(Refused(str(error), isinstance(error, NotNow)))
            raise
        channel.send(welcome)
        bound_sends(sock, 0)
    except BaseException:
        channel.close()
        raise
    channel.decoder = protocol.from_role[hello.role]
    return channel, hello


def _proves(key: bytes, challenge: Challenge, hello: Hello) -> bool:
    expected = client_proof(key, challenge, hello.role, hello.session, hello.nonce)
    return hmac.compare_digest(hello.proof, expected)


def connect(
    path: str,
    key: bytes,
    role: str,
    session: str,
    *,
    device_uuid: str = "",
    timeout_s: float = 5.0,
    hang_s: float = 0.0,
) -> tuple[Channel, Welcome]:
    """Connect to the packer listening at ``path`` and prove the key to each other, within ``timeout_s``.

    ``hang_s``: how long a later send may wait for room; 0: as long as it takes.
    PackerAbsent where nobody listens or this user may not reach the socket, PackerUnavailable where the connection fails
    otherwise, HandshakeError where the packer refuses or does not know the key.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel = Channel(sock, protocol.from_server)
    deadline = time.monotonic() + timeout_s
    try:
        timeout_s = max(timeout_s, 0.001)
        bound_sends(sock, timeout_s)
        try:
            sock.connect(path)
        except PermissionError as error:
            raise PackerAbsent(
                f"uid {os.geteuid()} may not reach {path} ({error.strerror}): the socket and its directory admit"
                " the packer's user, and its group where their modes say so"
            ) from error
        except OSError as error:
            # EAGAIN: so many wait already that no more find room, for one that does not accept just now
            absent = isinstance(error, (FileNotFoundError, ConnectionRefusedError, BlockingIOError))
            raise (PackerAbsent if absent else PackerUnavailable)(
                f"no packer listens at {path} ({error.strerror or error}): start one there, or correct the setting socket"
            ) from error
        challenge = cast(Challenge, _expect(channel, timeout_s, Challenge))
        if challenge.version != protocol.VERSION:
            raise HandshakeError(
                f"the packer at {path} speaks protocol {challenge.version}, this side {protocol.VERSION}:"
                " run the same release on both sides"
            )
        nonce = os.urandom(32)
        proof = client_proof(key, challenge, role, session, nonce)
        channel.send(Hello(protocol.VERSION, role, session, nonce, proof, device_uuid, os.getpid()))  # type: ignore[arg-type]
        left = max(deadline - time.monotonic(), 0.001)
        bound_sends(sock, left)
        answer = _expect(channel, left, Welcome, Refused)
        if isinstance(answer, Refused):
            raise (NotNow if answer.for_now else HandshakeError)(f"the packer at {path} refused: {answer.reason}")
        welcome = cast(Welcome, answer)
        if not hmac.compare_digest(welcome.proof, server_proof(key, challenge, nonce)):
            raise HandshakeError(f"whoever listens at {path} does not know the key")
        bound_sends(sock, hang_s)
    except ProtocolError as error:
        channel.close()
        raise HandshakeError(f"whoever listens at {path} does not speak this protocol: {error}") from error
    except PeerClosed as error:
        channel.close()
        raise PeerClosed(
            f"the packer at {path} hung up during the handshake: it ends, or its setting allowed_uids lacks uid"
            f" {os.geteuid()}; its log says which"
        ) from error
    except BaseException:
        channel.close()
        raise
    channel.decoder = protocol.to_role[role]
    return channel, welcome
