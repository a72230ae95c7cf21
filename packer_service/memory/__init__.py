"""Memory that two processes share, and the words and ranges in it. ``worker_shim`` uses it too."""
