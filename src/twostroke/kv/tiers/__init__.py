"""KV beyond the device: prefix blocks in host memory and on disk. What is where is known here; the backend moves bytes
between device and host memory, threads of this room between host memory and disk. Standard library only."""
