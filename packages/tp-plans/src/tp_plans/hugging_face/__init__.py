"""Plans that transformers ships with its models, translated to styles of this package."""
