"""Pipeline parallelism: the stages of a model, found by running a small copy, and schedules over them."""
