"""The ack page: what the packer puts there, the worker takes, once and in order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from packer_service.errors import ProtocolError
from packer_service.memory.ack_page import ACK_PAGE_BYTES, WORDS, AckPage
from packer_service.memory.memfd import create_memfd


@pytest.fixture
def pages():
    """The worker's mapping and the packer's."""
    with (
        contextlib.closing(AckPage.create()) as worker,
        contextlib.closing(AckPage.attach(os.dup(worker.fd))) as packer,
    ):
        yield worker, packer


def test_what_was_put_is_taken_once_and_in_order_for_many_rounds(pages):
    worker, packer = pages
    assert worker.take() == []
    ready = 0
    for number in [1, 2, WORDS - 1, WORDS, 0, 5] * 20:
        put = list(range(ready + 1, ready + 1 + number))
        ready += number
        assert all(packer.put(value) for value in put)
        assert worker.waiting == number
        assert worker.take() == put
        assert worker.waiting == 0
        assert worker.take() == []


def test_a_full_page_takes_no_more_until_the_worker_has_read_it(pages):
    worker, packer = pages
    assert [packer.put(value) for value in range(1, WORDS + 3)] == [True] * WORDS + [False] * 2
    assert worker.take() == list(range(1, WORDS + 1))
    assert packer.put(WORDS + 3)
    assert worker.take() == [WORDS + 3]


def test_an_export_without_a_value_of_its_own_is_not_put(pages):
    worker, packer = pages
    assert not packer.put(0)
    assert packer.put(1)
    assert worker.take() == [1]


PUT_ALL = """
import sys, threading
from packer_service.memory.ack_page import AckPage

page, last = AckPage.attach(int(sys.argv[1])), int(sys.argv[2])

def put(first):
    for value in range(first, last + 1, 2):
        while not page.put(value):
            pass

threads = [threading.Thread(target=put, args=(first,)) for first in (1, 2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_nothing_is_lost_or_seen_twice_while_two_threads_of_another_process_put(pages):
    worker, _ = pages
    last, taken, deadline = 20_000, [], time.monotonic() + 60
    command = [sys.executable, "-c", PUT_ALL, str(worker.fd), str(last)]
    with subprocess.Popen(command, pass_fds=(worker.fd,)) as packer:
        while packer.poll() is None and time.monotonic() < deadline:
            taken += worker.take()
        packer.kill()
    taken += worker.take()
    assert sorted(taken) == list(range(1, last + 1))
    assert [value for value in taken if value % 2] == list(range(1, last + 1, 2))


def test_a_page_that_is_too_small_is_refused():
    with pytest.raises(ProtocolError, match="holds 100 bytes"):
        AckPage.attach(create_memfd("too-small", 100))


def test_a_page_that_the_worker_could_cut_short_is_refused():
    fd = os.memfd_create("not-sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ACK_PAGE_BYTES)
    with pytest.raises(ProtocolError, match="not sealed against shrinking"):
        AckPage.attach(fd)
