"""What travels between processes: messages, the connections they travel on, and the proof of the key."""
