"""What runs in the engine's process: the executor, its packers, and the outputs that come from them."""
