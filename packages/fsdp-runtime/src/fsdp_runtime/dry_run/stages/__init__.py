"""Estimate a model in pipeline stages: trace each rank of ``pp`` once, and replay torch's schedule with its costs."""
