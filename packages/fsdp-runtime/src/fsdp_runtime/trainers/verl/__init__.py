"""fsdp-runtime as a training engine of verl: ``engine=fsdp_runtime`` in SFT, ``model_engine=fsdp_runtime`` in PPO.

Install it with ``pip install fsdp-runtime[verl]``.  verl finds :mod:`fsdp_runtime.trainers.verl.plugin` by the
entry-point group ``verl.plugins`` and imports it in every process; nothing here is imported earlier.
"""
