"""``python -m fsdp_runtime.gpu_check``: one command that measures properties visible only on GPUs.

``machine``   devices, versions, and on which device and backend a rank works
``ranks``     processes of one world, each check on all of them, and its result
``models``    small models of each kind, their inputs and loss
``settings``  the meshes, options and kinds of models of the parity check
``parity``    a step on every axis against the same step of one process
``training``  twenty steps, routes, weights sent and saved, offload, host waits
``kernels``   log-probabilities by Triton against torch's operators
``memory``    the peak of a step against the dry run's, with and without each lever of memory
``bench``     with ``--bench``: log-probabilities, norms, attention and steps beside torch and other packages
``report``    one Markdown page of all findings
"""
