"""``python -m packer_service``: the same as ``packer-service``.

An engine runs this file by its path, and says in MANAGED_PACKER_PATH where it looks for modules itself. So its packer is this
very package, whatever else goes by that name, and the current directory is not code.
"""

import os
import sys

if path := os.environ.pop("MANAGED_PACKER_PATH", ""):
    sys.path[:] = [os.path.dirname(os.path.dirname(__file__))]
    import packer_service  # noqa: F401  it imports nothing itself

    sys.path[:] = path.split("\n")

from packer_service.cli import main

main()
