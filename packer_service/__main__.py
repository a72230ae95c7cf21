"""``python -m packer_service``: the same as ``packer-service``."""

from packer_service.cli import main

main()
