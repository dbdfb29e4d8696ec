"""What the CUDA caching allocator reserves for a step: a model of the allocator, and the step replayed on it."""
