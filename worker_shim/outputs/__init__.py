"""An output of vllm-omni, and what of it travels."""
