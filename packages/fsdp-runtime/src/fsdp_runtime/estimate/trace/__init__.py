"""One step on fake tensors: allocations, modules and collectives."""
