"""Context parallelism: sequence shards, attention over them, and ring attention."""
