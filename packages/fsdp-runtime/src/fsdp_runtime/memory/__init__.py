"""Memory between steps: unsharding, gradient accumulation and offload."""
