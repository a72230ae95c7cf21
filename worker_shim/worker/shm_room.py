"""Room in /dev/shm for what vllm-omni sends its own way.

Note [A full /dev/shm]
Whoever touches a page of named shared memory that a full /dev/shm cannot give is killed by SIGBUS. Two things of a worker's are
there: a segment for each large array of an output that takes vllm-omni's own path, and the rings of its message queues,
whose pages come as they are first written to. So the pages of a segment are reserved before anybody writes to it, which fails
where there are none, however many workers ask at once; and it leaves the rings what they have not taken yet. An array for
which there is no room travels in the message: a large one goes through a socket then, as vLLM has it. A message that goes
into the ring is reserved where room is short; where that fails its output fails, and says so in a message that is small
enough for the pages that every part of the ring is given at the start.
"""

from __future__ import annotations

import builtins
import errno
import functools
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import shared_memory
from typing import Any

import torch
from vllm_omni.diffusion import ipc

from packer_service.errors import PackerError
from worker_shim.log import get_logger

logger = get_logger(__name__)

SHM = "/dev/shm"
_SMALL_BYTES = 64 << 10
_SLACK_BYTES = 4 << 10
_REMEDY = f"enlarge {SHM} (docker run --shm-size; Kubernetes: an emptyDir of medium Memory mounted there)"


class NoRoom(PackerError):
    """A message finds no room in /dev/shm."""


def free_bytes() -> int:
    status = os.statvfs(SHM)
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize  # a tmpfs without a limit says 0 of 0


def _shown() -> str:
    status = os.statvfs(SHM)
    return f"{SHM} holds {status.f_blocks * status.f_frsize >> 20} MiB, of which {free_bytes() >> 20} are free"


class Rings:
    """The rings in shared memory of a worker's message queues, which remove their names when they die: none is kept here."""

    def __init__(self, queues: Iterable[Any]) -> None:
        self._references = [weakref.ref(queue.buffer) for queue in queues if getattr(queue, "buffer", None) is not None]

    @property
    def _rings(self) -> list[Any]:
        return [ring for reference in self._references if (ring := reference()) is not None]

    def reserve_small(self) -> None:
        """Have the pages of the first 64 KiB of every part now."""
        try:
            for ring in self._rings:
                for part in range(ring.max_chunks):
                    _reserve(ring, part, min(_SMALL_BYTES, ring.max_chunk_bytes))
        except OSError as error:
            logger.warning("%s, too little for vllm's message queues (%s): %s", _shown(), error.strerror, _REMEDY)

    def missing_bytes(self) -> int:
        """What they may still take."""
        statuses = [os.fstat(ring.shared_memory._fd) for ring in self._rings]
        return sum(max(status.st_size - status.st_blocks * 512, 0) for status in statuses)


def reserve_message(queue: Any, message: object) -> None:
    """Have the pages that ``message`` is about to be written to. NoRoom where there are none. Called by the queue's writer."""
    ring = getattr(queue, "buffer", None)
    if ring is None or free_bytes() >= ring.max_chunk_bytes:
        return
    nbytes = len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) + _SLACK_BYTES
    if nbytes >= ring.max_chunk_bytes:
        return  # it goes through a socket
    try:
        _reserve(ring, queue.current_idx, nbytes)
    except OSError as error:
        raise NoRoom(f"a message of {nbytes} bytes finds no room: {_shown()}: {_REMEDY}") from error


def _reserve(ring: Any, part: int, nbytes: int) -> None:
    os.posix_fallocate(ring.shared_memory._fd, ring.data_offset + part * ring.max_chunk_bytes, nbytes)


def pack_into_what_is_free(rings: Rings) -> None:
    """Have vllm-omni's packing, in this process, reserve what it writes to, and leave in the output what finds no room."""

    class Reserved(shared_memory.SharedMemory):
        def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
            super().__init__(name, create, size)
            try:
                os.posix_fallocate(self._fd, 0, size)  # type: ignore[attr-defined]
                if free_bytes() < rings.missing_bytes():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                self.close()
                self.unlink()
                raise

    ipc._array_to_shm = _with_shared_memory(ipc._array_to_shm, Reserved)
    ipc._tensor_to_shm = _or_inline(ipc._tensor_to_shm, lambda tensor: tensor.detach().to("cpu", copy=True))
    ipc._ndarray_to_shm = _or_inline(ipc._ndarray_to_shm, lambda array: array)


def _with_shared_memory(function: Any, cls: type) -> Any:
    """``function`` with another SharedMemory, wherever it imports that: nobody else's is touched."""
    stand_in = types.SimpleNamespace(SharedMemory=cls)

    def import_(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "multiprocessing":
            return types.SimpleNamespace(shared_memory=stand_in)
        return builtins.__import__(name, *args, **kwargs)

    names = {
        **function.__globals__,
        "shared_memory": stand_in,
        "__builtins__": {**vars(builtins), "__import__": import_},
    }
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _or_inline(pack: Callable[..., Any], inline: Callable[[Any], Any]) -> Callable[..., Any]:
    said = False

    @functools.wraps(pack)
    def packed(value: torch.Tensor | Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal said
        try:
            return pack(value, *args, **kwargs)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        if not said:
            said = True
            logger.warning(
                "%s, too little for an array of %d bytes: such arrays take vllm's socket, which is slower; %s",
                _shown(),
                value.nbytes,
                _REMEDY,
            )
        return inline(value)

    return packed
