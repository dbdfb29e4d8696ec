"""Attention of packed rows and of ``cp``: one decision per model about its kernels, and the calls of these kernels."""
