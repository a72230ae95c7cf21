"""``packer-service demo``."""
