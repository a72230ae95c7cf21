"""The real vllm-omni engine on synthetic pipelines: for ``packer-service demo``, the tests and the benchmarks."""
