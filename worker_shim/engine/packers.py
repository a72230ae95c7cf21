"""The packers of one executor: started or found, a session with each, kept as long as a worker uses it, ended in order."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Callable

from vllm_omni.platforms import current_omni_platform

from packer_service.config import Settings
from packer_service.errors import PackerError, PackerUnavailable
from packer_service.wire import handshake
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Welcome
from worker_shim.engine.counts import Counts, EngineCounts
from worker_shim.engine.receiver import Delivered
from worker_shim.engine.result_queue import PackerResultQueue
from worker_shim.engine.supervisor import Supervisor
from worker_shim.link import Link, LinkState
from worker_shim.log import get_logger
from worker_shim.retries import Arrival
from worker_shim.worker_config import WorkerConfig

logger = get_logger(__name__)


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
        counts: Counts | None = None,
    ) -> None:
        self.socket = socket
        self.welcome: Welcome
        self.queue = PackerResultQueue(mac_key, delivered, counts)
        self._key = key
        self._session = session
        self._settings = settings
        self._device_uuid = ""  # of the first connection
        self._link = Link(self._connect, self.queue, settings, name=f"the packer at {socket}", restart=restart)
        self.queue.on_leaving = self._link.expect_end
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

    @property
    def state(self) -> LinkState:
        return self._link.state

    @property
    def avoided(self) -> bool:
        """Whether outputs take vllm-omni's own path because this packer was given up, or ends soon."""
        return self.state is LinkState.GIVEN_UP or self._link.ends_soon

    @property
    def reconnects(self) -> int:
        return max(self._link.connections - 1, 0)

    def stop(self) -> None:
        """Bring nothing back any more. The connection stays: see ``close``."""
        self._link.stop()

    def close(self) -> None:
        """End the session. Tensors that are out stay valid. Call ``stop`` first, and end a packer being started."""
        self.queue.close()
        self._link.close(self._settings.handshake_timeout_s + 1.0)


class Packers:
    """One keeper a packer, and the supervisor of managed ones. The executor's thread opens them; any thread may end them.

    Once ``closing`` is set, none is waited for any more.
    """

    def __init__(self, delivered: Delivered, closing: threading.Event) -> None:
        self.keepers: list[PackerKeeper] = []
        self.counts = EngineCounts()
        self._supervisor: Supervisor | None = None
        self._delivered = delivered
        self._closing = closing

    def open(self, settings: Settings, ranks: frozenset[int]) -> WorkerConfig:
        """Have a packer for every GPU whose worker replies (``ranks``), and a session with each.

        With none to be had, no rank exports: our worker packs outputs the way vllm-omni does, on any device.
        PackerUnavailable instead where ``fallback="fail"``.
        """
        try:
            packers, key = self._start(settings, ranks) if settings.mode == "managed" else self._find(settings)
            session, mac_key = secrets.token_hex(16), secrets.token_bytes(32)
            arrival = Arrival(settings, self._closing) if settings.mode == "sidecar" else None
            for socket, restart in packers.items():
                queue = session, mac_key, self._delivered
                keeper = PackerKeeper(socket, key, *queue, settings, restart, arrival, self.counts.new())
                self.keepers.append(keeper)
                device = keeper.welcome
                logger.info(
                    "outputs of %s (%s) go through packer %d", device.device_name, device.device_uuid, device.pid
                )
        except (PackerError, OSError) as error:
            self.close()
            if settings.fallback == "fail" or self._closing.is_set():
                raise
            logger.warning(
                "packer: serving through vllm-omni's own output path: %s. The setting fallback='fail' refuses instead",
                error,
            )
            return WorkerConfig(settings, "", {}, frozenset(), b"", b"")
        by_device = {keeper.welcome.device_uuid: keeper.socket for keeper in self.keepers}
        return WorkerConfig(settings, session, by_device, ranks, key, mac_key)

    def _find(self, settings: Settings) -> tuple[dict[str, Callable[[], None] | None], bytes]:
        """The sockets of the packers that somebody else runs, one a GPU, and their key. Nothing of ours starts them again."""
        if not settings.sockets():
            raise PackerUnavailable(
                "mode is 'sidecar' and the setting socket names no packer's socket (PACKER_SOCKET=/run/packer/gpu0.sock;"
                " of several GPUs, separated by commas)"
            )
        return dict.fromkeys(settings.sockets()), settings.read_key()

    def _start(self, settings: Settings, ranks: frozenset[int]) -> tuple[dict[str, Callable[[], None] | None], bytes]:
        """The sockets of packers that were started, one a GPU, with what starts each again, and their key."""
        kind = current_omni_platform.device_type
        if kind not in ("cuda", "cpu") or (kind == "cuda" and not current_omni_platform.is_cuda()):
            raise PackerUnavailable(f"the packer copies from NVIDIA GPUs, and this platform is {kind!r}")
        self._supervisor = supervisor = Supervisor(settings)
        for device in [f"cuda:{rank}" for rank in sorted(ranks)] if kind == "cuda" else ["host"]:
            supervisor.start(device)
        restarts = {packer.socket: functools.partial(supervisor.restart, packer) for packer in supervisor.packers}
        return {**restarts}, supervisor.key

    def keep_only(self, device_uuids: set[str]) -> None:
        """End the session with every packer of another device: no worker uses it. A managed one exits with that."""
        unused = [keeper for keeper in self.keepers if keeper.welcome.device_uuid not in device_uuids]
        self.keepers = [keeper for keeper in self.keepers if keeper not in unused]
        for keeper in unused:
            logger.warning("packer: no worker uses the packer at %s, which is left", keeper.socket)
            keeper.stop()
            keeper.close()

    @property
    def restarts(self) -> int:
        """How often managed packers were started again, those starts included that failed."""
        supervisor = self._supervisor
        return sum(packer.restarts for packer in list(supervisor.packers)) if supervisor is not None else 0

    @property
    def queues(self) -> list[PackerResultQueue]:
        return [keeper.queue for keeper in self.keepers]

    def states(self, output_id: str, timeout_s: float) -> list[str]:
        """How far each packer is with an output. All are asked before any is waited for."""
        answers = [queue.ask(output_id) for queue in self.queues]
        deadline = time.monotonic() + timeout_s
        return [answer(deadline) for answer in answers]

    def await_last_outputs(self, timeout_s: float) -> None:
        """A worker died: wait until what it had finished was delivered, up to ``timeout_s`` for each packer."""
        for queue in self.queues:
            queue.await_last_outputs(timeout_s)

    def stop(self) -> None:
        """Bring nothing back any more; what is there goes on."""
        for keeper in self.keepers:
            keeper.stop()

    def close(self) -> None:
        """End managed packers, then the sessions. Tensors that are out stay valid. Idempotent."""
        self.stop()
        keepers, self.keepers = self.keepers, []
        with contextlib.ExitStack() as ends:  # from the last to the first, and each also where the one before it failed
            for keeper in keepers:
                ends.callback(keeper.close)
            if self._supervisor is not None:
                ends.callback(self._supervisor.stop)
                self._supervisor = None
