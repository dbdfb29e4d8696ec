"""The entry point of the gloo backend in vLLM's group ``vllm.general_plugins``; every process of vLLM calls it."""

from __future__ import annotations

#: The name of the backend in ``--weight-transfer-config '{"backend": "gloo"}'``.
BACKEND = "gloo"


def register() -> None:
    """Register the gloo backend with vLLM's factories for workers and for trainers; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from vllm_gloo._vllm_compat import is_registered

    package = __name__.rpartition(".")[0]
    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "GlooWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "GlooTrainerWeightTransferEngine"),
    ):
        if not is_registered(factory, BACKEND):
            factory.register_engine(BACKEND, f"{package}.{module}", name)
