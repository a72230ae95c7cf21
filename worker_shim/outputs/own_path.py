"""Why an output took vllm-omni's own path: what the worker tells the engine of it."""

from __future__ import annotations

import enum


class OwnPathReason(enum.Enum):
    """Why an output did not go through a packer."""

    NO_PACKER = "no_packer"  # the engine, or this worker, started without one
    GONE = "gone"  # the packer went away, and nobody waits for it any more
    DRAINING = "draining"  # the packer said that it ends soon
    PAUSED = "paused"  # by an operator
    DECLINED = "declined"  # by the packer, which counts why
    NO_DEVICE_ROOM = "no_device_room"  # arena and overflow were full
    SMALL = "small"  # it has fewer than min_bytes
    IN_REPLY = "in_reply"  # of step mode, or a DP wave: it stayed in its reply, for one of the reasons above
    OTHER = "other"
