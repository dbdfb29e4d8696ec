"""Kept-set replay: softmax statistics over the vocabulary ids that a sampler kept.

``kept_sets``: the value with the ids.  ``entries``: its rows for this rank's tokens, and statistics over them.
``kept_logits``: the logits of the kept ids, from logits or hidden states.
"""
