"""What runs in the worker's process: the exporter, between vllm-omni's worker and a packer."""
