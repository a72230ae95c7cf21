"""The descriptors that a process of ours starts with: none of the standard ones is missing, and there may be many.

Nothing here touches a descriptor that is open.
"""

from __future__ import annotations

import logging
import os
import resource

logger = logging.getLogger(__name__)


def open_standard_descriptors() -> None:
    """Put /dev/null where descriptors 0 to 2 are closed. Call it before anything is opened that stays open.

    Else a memfd or a socket gets such a number, and whoever writes to the standard error (a driver, the interpreter
    itself) writes into it. Children inherit them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def raise_descriptor_limit() -> None:
    """Have as many descriptors as the system lets this process have; the usual soft limit of 1024 is for select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # fs.nr_open was lowered below it, or a sandbox refuses
        logger.warning("the limit of open files stays at %d: %s; see LimitNOFILE or ulimit -n", soft, error)
