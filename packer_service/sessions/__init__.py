"""What a packer does for one engine, for one worker, and for one operator."""
