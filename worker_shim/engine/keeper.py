"""One packer as its executor sees it, across restarts: connected to when made, brought back when lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from packer_service.config import Settings
from packer_service.errors import PackerError, PackerUnavailable
from packer_service.wire import handshake
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Welcome
from worker_shim.engine.delivered import Delivered
from worker_shim.engine.result_queue import PackerResultQueue
from worker_shim.log import get_logger
from worker_shim.restarts import Arrival, RestartBudget, Retries

logger = get_logger(__name__)

_FIRST_PAUSES_S = (0.0, 0.05)
_WATCH_S = 0.2


class PackerKeeper:
    """Owns the connection of one engine session to one packer, and the queue that reads it.

    ``restart`` starts a managed packer again; None where somebody else does. One thread, which sleeps until the queue says
    that its connection ended. Making one raises PackerError where the packer cannot be reached; ``arrival`` has it waited for.
    """

    def __init__(
        self,
        socket: str,
        key: bytes,
        session: str,
        mac_key: bytes,
        delivered: Delivered,
        settings: Settings,
        restart: Callable[[], None] | None,
        arrival: Arrival | None = None,
    ) -> None:
        self.socket = socket
        self.welcome: Welcome
        self._key = key
        self._session = session
        self._settings = settings
        self._restart = restart
        self._budget = RestartBudget(settings)
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()  # why each connection ended
        self._closing = threading.Event()
        self._device_uuid = ""  # of the first connection
        channel = arrival.connect(self._connect) if arrival else self._connect(settings.start_timeout_s)
        self.queue = PackerResultQueue(channel, mac_key, delivered, settings.hang_s, self._ends.put)
        self._thread = threading.Thread(target=self._keep, name="packer-keeper", daemon=True)
        self._thread.start()

    def _connect(self, timeout_s: float) -> Channel:
        """Also refuses a packer of another device than the first's: the worker could not use it, nor say why not."""
        channel, welcome = handshake.connect(
            self.socket, self._key, "engine", self._session, timeout_s=timeout_s, hang_s=self._settings.hang_s
        )
        self._device_uuid = self._device_uuid or welcome.device_uuid
        if welcome.device_uuid != self._device_uuid:
            channel.close()
            raise PackerUnavailable(
                f"packer {welcome.pid} serves {welcome.device_uuid}, and the worker runs on {self._device_uuid}:"
                " start one there that has the worker's GPU as its device"
            )
        self.welcome = welcome
        return channel

    def _keep(self) -> None:
        while (reason := self._next_end()) and not self._closing.is_set():
            self._bring_back(reason)

    def _next_end(self) -> str:
        """Why the connection ended. Until the pump reads from it, this thread does, or would not hear of that."""
        while self._ends.empty() and self.queue.watch(_WATCH_S):
            pass
        return self._ends.get()

    def _bring_back(self, reason: str) -> None:
        """Until a connection is made, or this side closes."""
        logger.warning("the packer at %s is gone: %s", self.socket, reason)
        retries = Retries(self._budget, self._settings, self._closing, _FIRST_PAUSES_S, self._give_up)
        while retries.wait(reason):
            before = reason
            try:
                if self._restart is not None:
                    self._restart()
                channel = self._connect(self._settings.handshake_timeout_s)
                try:
                    self.queue.attach(channel)
                except BaseException:
                    channel.close()
                    raise
            except (PackerError, OSError) as error:
                reason = str(error)
            except Exception as error:  # a defect of ours; were this thread to end, nobody would use a packer again
                reason = f"{type(error).__name__}: {error}"
                logger.exception("the packer at %s cannot be used", self.socket)
            else:
                logger.info("the packer at %s is back: packer %d", self.socket, self.welcome.pid)
                return
            if retries.given_up and reason != before:
                logger.error("the packer at %s still does not come back: %s", self.socket, reason)
            if self._restart is not None:
                retries.count_end()

    def _give_up(self, reason: str) -> None:
        logger.error(
            "the packer at %s does not come back: %s. It is tried again every retry_s = %g s, and meanwhile outputs"
            " take vllm-omni's own path (settings max_restarts, restart_window_s, restart_wait_s)",
            self.socket,
            reason,
            self._settings.retry_s,
        )

    def stop(self) -> None:
        """Bring nothing back any more. The connection stays: see ``close``."""
        self._closing.set()

    def close(self) -> None:
        """End the session. Tensors that are out stay valid. Call ``stop`` first, and end a packer being started."""
        self._ends.put("")
        self._thread.join(timeout=self._settings.handshake_timeout_s + 1.0)
        self.queue.close()
