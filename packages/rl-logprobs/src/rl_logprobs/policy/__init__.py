"""Policy-gradient pieces over log-probabilities: pure functions with masks.

``global_mean``: one mean over a batch, however it is cut.  ``advantages``: group advantages.  ``losses``: clipped
objectives.  ``corrections``: importance weights and rejection between generator and trainer.  ``metrics``: ratios,
divergences and clip fractions in one pass.  ``sequences``: sums over the tokens of each sequence.
"""
