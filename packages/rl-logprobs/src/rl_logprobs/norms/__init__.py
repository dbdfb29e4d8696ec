"""Gradient norms and clipping over any mix of meshes, placements and devices.

``grad_norm``: the public functions.  ``local_gradients``: this rank's part of each gradient.  ``local_norms``: norms of
local tensors.  ``reduce_groups``: the ranks over which norms are summed.
"""
