"""Sharded tensors: offsets, chunks, gathering, collectives over the ranks of a model, and safetensors files."""
