"""What this project claims, measured. Each module prints a table and writes one JSON object with ``--json FILE``."""
