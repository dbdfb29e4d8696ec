"""The bytes that the CUDA caching allocator reserves for a step: an allocator model, and the step replayed on it."""
