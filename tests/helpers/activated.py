"""Becomes ``packer_service serve`` as systemd starts it: ``activated.py FD ARGUMENT...`` passes it the socket FD; -1: none."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    fd = int(sys.argv[1])
    if fd >= 0:
        os.dup2(fd, 3, inheritable=True)
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "packer-service"}
    if "WATCHDOG_USEC" in os.environ:
        os.environ["WATCHDOG_PID"] = str(os.getpid())
    os.execv(sys.executable, [sys.executable, "-m", "packer_service", "serve", *sys.argv[2:]])
