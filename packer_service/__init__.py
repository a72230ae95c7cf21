"""The packer: one process a GPU that moves worker outputs from the device into shared host memory.

This package imports neither torch nor vllm and never unpickles anything a peer sent.
"""

__version__ = "0.1.0"
