"""A model's structure, state, buffers and materialisation."""
