"""Several engines on one packer: what one does, holds or breaks is nothing to another, and each has its share."""

from __future__ import annotations

import collections
import secrets

import pytest
from packer_process import DEADLINE_S, MIB, Engine, Worker, running_packer, session, transfer, wait_until

from packer_service.operator import Operator
from packer_service.wire.protocol import Nack, Refused, Release

IN_FLIGHT = 4
OUTPUTS = 120


@pytest.fixture(scope="module")
def packer(tmp_path_factory):
    # Room for four engines, three of them with all of what one may take beyond its promise.
    with running_packer(tmp_path_factory.mktemp("packer"), pool_max_bytes="16MiB", wait_s=0.05) as one:
        yield one


@pytest.fixture
def pairs(packer):
    with session(packer) as one, session(packer) as other:
        yield one, other


def hold(engine: Engine, worker: Worker, nbytes: int) -> int:
    """An output of ``nbytes`` that the engine keeps; its lease, or 0 where the packer declines it."""
    output = secrets.token_hex(8)
    worker.export(output, worker.write(bytes(nbytes)))
    worker.skeleton(output)
    answer = worker.answer()
    return 0 if isinstance(answer, Nack) else engine.next().leases[0].lease


def test_no_engine_sees_memory_of_another(pairs):
    for engine, worker in pairs:
        transfer(engine, worker)
    (one, _), (other, _) = pairs
    assert one.segments
    assert other.segments
    for segment in one.segments.values():
        segment.buffer[:16] = b"written by one.."
    assert all(segment.buffer[:16] != b"written by one.." for segment in other.segments.values())


def test_an_engine_that_gives_back_the_lease_of_another_changes_nothing(packer, pairs):
    (one, worker), (other, others_worker) = pairs
    lease = hold(one, worker, 4096)
    other.channel.send(Release(tuple(range(1, lease + 2))))
    transfer(other, others_worker)
    with Operator(packer.socket, packer.key) as operator:
        leases = {each.session: each.leases for each in operator.status().engines}
    assert leases[one.session] == 1
    one.release(lease)


def test_an_engine_asks_in_vain_for_the_output_of_another(pairs):
    (one, worker), (other, _) = pairs
    worker.export("of one", worker.write(b"data"), complete=False)
    wait_until(lambda: "forward" in one.describe("of one"), "the packer has it")
    assert "not here" in other.describe("of one")


@pytest.mark.parametrize("who", ["engine", "worker"])
def test_what_one_breaks_ends_its_own_session_alone(packer, pairs, who):
    (one, worker), (other, others_worker) = pairs
    (one if who == "engine" else worker).channel._socket.send(b"\xff is no message")
    if who == "worker":
        assert isinstance(worker.answer(), Refused)
    else:
        packer.wait_log(f"engine {one.session} broke the protocol")
    for _ in range(3):
        transfer(other, others_worker)


def test_an_engine_that_keeps_all_it_can_get_leaves_another_its_promise(pairs):
    (greedy, worker), (other, others_worker) = pairs
    kept = []
    while lease := hold(greedy, worker, MIB):
        kept.append(lease)
    assert len(kept) >= 8, "there was more for it than its own promise"
    assert hold(other, others_worker, 2 * MIB), "which is 2 MiB (pool_bytes)"
    for lease in kept:
        greedy.release(lease)
    wait_until(lambda: hold(greedy, worker, MIB), "room comes back", DEADLINE_S)


def test_engines_under_the_same_load_have_the_same_share(packer):
    """By count: when one has had all of its outputs, the other has had most of its own."""
    with session(packer, arena_bytes=8 * MIB) as one, session(packer, arena_bytes=8 * MIB) as other:
        sent, received = collections.Counter(), collections.Counter()

        def send(number: int) -> None:
            _, worker = (one, other)[number]
            sent[number] += 1
            output = f"{number}-{sent[number]}"
            worker.export(output, worker.write(bytes(65536), (sent[number] % IN_FLIGHT) * 65536))
            worker.skeleton(output)

        for number in (0, 1):
            for _ in range(IN_FLIGHT):
                send(number)
        while max(received.values(), default=0) < OUTPUTS:
            for number, (engine, worker) in enumerate((one, other)):
                if (ready := engine.poll()) is not None:
                    received[number] += 1
                    engine.release(*(lease.lease for lease in ready.leases))
                    worker.answer()
                    send(number)
        assert min(received.values()) > OUTPUTS / 2
