"""Sharded tensors: shard offsets, chunks, gathering, collectives over a model's ranks, safetensors files."""
