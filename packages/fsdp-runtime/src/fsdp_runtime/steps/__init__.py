"""The parallelisms and transformations that ``parallelize`` applies."""
