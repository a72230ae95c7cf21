"""What ``packer-service doctor`` looks at: one module for each group of checks, and the processes that try things.

A check returns findings and prints nothing. It never imports torch, vllm or worker_shim, and changes nothing that stays.
"""
