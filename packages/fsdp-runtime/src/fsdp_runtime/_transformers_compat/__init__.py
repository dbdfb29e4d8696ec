"""Every use of transformers' semi-private API, with its reason, by subject; tested on transformers 5.10 to 5.24.

transformers is imported only for a transformers model, so this package does not depend on it.
"""
