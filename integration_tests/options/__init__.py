"""Change the fields of every architecture's config, one at a time, and compare two ranks with one process."""
