"""Weights in FP8, MXFP8 and NVFP4 with their scales, as quantized checkpoints store them."""
