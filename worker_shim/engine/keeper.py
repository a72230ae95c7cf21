"""One packer as its executor sees it, across restarts: a link to it, and the queue of what it sends."""

from __future__ import annotations

from collections.abc import Callable

from packer_service.config import Settings
from packer_service.errors import PackerUnavailable
from packer_service.wire import handshake
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Welcome
from worker_shim.engine.delivered import Delivered
from worker_shim.engine.result_queue import PackerResultQueue
from worker_shim.link import Link
from worker_shim.retries import Arrival


class PackerKeeper:
    """Owns the link of one engine session to one packer, and the queue that reads it.

    ``restart`` starts a managed packer again; None where somebody else does. Making one raises PackerError where the packer
    cannot be reached; ``arrival`` has it waited for.
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
        self.queue = PackerResultQueue(mac_key, delivered)
        self._key = key
        self._session = session
        self._settings = settings
        self._device_uuid = ""  # of the first connection
        self._link = Link(self._connect, self.queue, settings, name=f"the packer at {socket}", restart=restart)
        self._link.open(arrival)
        self._link.start()

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

    def stop(self) -> None:
        """Bring nothing back any more. The connection stays: see ``close``."""
        self._link.stop()

    def close(self) -> None:
        """End the session. Tensors that are out stay valid. Call ``stop`` first, and end a packer being started."""
        self.queue.close()
        self._link.close(self._settings.handshake_timeout_s + 1.0)
