"""Every architecture that has a tensor-parallel plan, as a tiny model, and whether ours is right for it."""
