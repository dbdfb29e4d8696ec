"""``python -m fsdp_runtime.gpu_check``: one command that measures properties visible only on GPUs.

``check_result``  findings, and one Markdown page of them
``machine``       devices, versions, and on which device and backend a rank works
``ranks``         processes of one world, each check on all of them, and its result
``models``        small models of each kind, their inputs and loss
``parity``        a step on every axis against the same step of one process
``training``      twenty steps, routes, weights sent and saved, offload, host waits
``kernels``       log-probabilities by Triton against torch's operators
``step_costs``    the peak of a step against the dry run's, with and without each lever of memory
``float8``        a block in float8 beside bfloat16
``bench``         with ``--bench``: log-probabilities, norms, attention and steps beside torch and other packages
"""
