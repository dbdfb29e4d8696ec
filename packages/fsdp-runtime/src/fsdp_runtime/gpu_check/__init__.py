"""``python -m fsdp_runtime.gpu_check``: one command that measures properties visible only on GPUs.

``machine``   devices, versions, and on which device and backend a rank works
``ranks``     processes of one world, each check on all of them, and its result
``parity``    a step on every axis against the same step of one process
``kernels``   log-probabilities by Triton against torch's operators
``memory``    the peak of a step against the dry run's
``speed``     gradient norm and log-probabilities against a copy of as many bytes
``bench``     with ``--bench``: log-probabilities, norms and clipping beside torch and other packages
``transfer``  weights from shards to shards over the backend
``report``    one Markdown page of all findings
"""
