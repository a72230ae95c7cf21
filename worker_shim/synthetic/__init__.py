"""The real vllm-omni engine on pipelines with no weights: for ``packer-service demo``, tests and benchmarks."""
