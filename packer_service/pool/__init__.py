"""The pinned host memory of one engine session."""
