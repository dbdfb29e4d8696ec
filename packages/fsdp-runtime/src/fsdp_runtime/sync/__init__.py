"""Transfer of weights from shards to shards: a model's layout, buckets of point-to-point messages, digests."""
