"""Record one step on fake tensors: allocations, running modules, collectives, operations."""
