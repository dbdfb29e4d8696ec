"""Softmax statistics over a vocabulary that is sharded across ranks, and their gradients.

``vocab_parallel``: statistics of logits.  ``fused_linear``: statistics of hidden states and an LM head.
``divergence``: between two softmaxes, from either.  ``vocab_shard``: the columns and tokens of a rank.
``partial_softmax``: the contribution of a rank, and the combination of contributions.  ``torch_kernels``,
``triton_kernels``, ``backends``: the arithmetic on local columns.  ``threshold``: the least logit of a top-k or top-p.
``gumbel``: sampling noise.  ``log2_scale``: temperature and exponents of two.  ``row_blocks``: iteration in a workspace
of bounded size.
"""
