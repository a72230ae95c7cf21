"""vLLM's own message queue, read by a thread that sleeps between two looks."""

from __future__ import annotations

import threading
import time
import types

import pytest
from packer_process import DEADLINE_S

pytest.importorskip("vllm")
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from worker_shim.engine.pump import SleepingCondition, sleep_between_looks

pytestmark = pytest.mark.engine


@pytest.fixture
def queues():
    """A queue's writer, and its reader."""
    writer = MessageQueue(1, 1, local_reader_ranks=[0])
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    sleep_between_looks(reader)
    assert type(reader._spin_condition) is SleepingCondition
    return writer, reader


def test_messages_shortly_after_one_another_are_read_without_a_notification(queues):
    """That of the second is often dropped."""
    writer, reader = queues
    reader._spin_condition.busy_loop_s = DEADLINE_S
    reader._spin_condition.poller = None  # to wait for one would raise
    thread = threading.Thread(target=lambda: [writer.enqueue(number) for number in range(100)])
    thread.start()
    assert [reader.dequeue(timeout=DEADLINE_S) for _ in range(100)] == list(range(100))
    thread.join(DEADLINE_S)


def test_a_reader_that_waits_right_after_a_message_leaves_its_core_to_others(queues):
    writer, reader = queues
    writer.enqueue("message")
    assert reader.dequeue(timeout=DEADLINE_S) == "message"
    before = time.thread_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.8)
    assert time.thread_time() - before < 0.4


def test_a_reader_that_has_waited_long_is_woken(queues):
    writer, reader = queues
    reader._spin_condition.busy_loop_s = 0.05
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.2)
    timer = threading.Timer(0.2, writer.enqueue, ("message",))
    timer.start()
    assert reader.dequeue(timeout=DEADLINE_S) == "message"
    timer.join()


@pytest.mark.parametrize("condition", [None, object(), threading.Condition()], ids=["none", "unknown", "other"])
def test_a_queue_that_is_not_read_from_shared_memory_stays_as_it_is(condition):
    queue = types.SimpleNamespace(_spin_condition=condition)
    kind = type(condition)
    sleep_between_looks(queue)
    assert queue._spin_condition is condition
    assert type(condition) is kind
    sleep_between_looks(None)
