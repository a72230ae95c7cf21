"""Which outputs the engine has already: of an output that comes twice, by whichever way, only the first counts."""

from __future__ import annotations

import collections
import threading

_REMEMBERED = 1 << 16


class Delivered:
    """The ids already delivered, by whichever queue. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: collections.OrderedDict[str, None] = collections.OrderedDict()

    def first(self, output_id: str) -> bool:
        """True the first time it is asked about ``output_id``."""
        with self._lock:
            if output_id in self._ids:
                return False
            self._ids[output_id] = None
            if len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)
            return True

    def __contains__(self, output_id: str) -> bool:
        return output_id in self._ids
