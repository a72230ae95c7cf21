"""What a packer does for one engine, and for one worker."""
