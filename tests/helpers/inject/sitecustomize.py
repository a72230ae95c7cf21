"""Python imports this at its start where tests/helpers/injection.py put it on the module path. It breaks packers alone.

A fault is a file in $PACKER_FAULTS, looked for each time: a test makes and removes it while the packer runs.
"""

import os
import sys

if os.environ.get("PACKER_FAULTS") and any(
    argument.endswith(("packer_service", "packer_service/__main__.py")) for argument in sys.orig_argv
):
    import faulty_packer

    faulty_packer.install()
