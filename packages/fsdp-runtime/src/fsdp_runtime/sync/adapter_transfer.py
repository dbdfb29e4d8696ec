"""Send the adapters of a ``PeftModel`` to a running vLLM server; the server's base model does not change."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from fsdp_runtime import save_adapter
from fsdp_runtime._peft_compat import base_model, lora_layers
from fsdp_runtime.errors import OptionError, WeightSyncError
from fsdp_runtime.sharded import ModelState, own_rank, require_path
from fsdp_runtime.sync.engine_client import EngineClient
from fsdp_runtime.sync.weight_transfer import on_every_rank
from fsdp_runtime.weights import require_adapter, saved_tensors

_log = logging.getLogger(__name__)

#: ``LoraConfig`` settings that train more than two factors per layer.
_BEYOND_FACTORS = ("modules_to_save", "use_dora", "lora_bias", "trainable_token_indices", "layer_replication")


@dataclass(frozen=True)
class AdapterReport:
    """One update of adapters."""

    version: int  # the version that the server now serves
    names: Mapping[str, str]  # the server's name of each adapter; requests give it as ``model``
    nbytes: int  # bytes of the adapters' tensors, which are all that the server reads


class AdapterTransfer:
    """Adapters on a vLLM server that was started with ``--enable-lora``; only their tensors are sent.

    Every version of an adapter has a separate name on the server, ``NAME-vVERSION``: vLLM caches keys and
    values under this name, and a running request finishes with the version it started with.  A version is a directory
    in peft's format, which the server reads, so trainer and server share a file system.

    Args:
        server: the URL of a server started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``, or a client with the methods
            of :class:`~fsdp_runtime.sync.engine_client.EngineClient`.
        directory: the folder of the versions; the same on every rank, and visible to the server.
        adapters: the names of the adapters in the ``PeftModel``.
        name: prefix of the names on the server; with several adapters the adapter's name follows.
        keep: versions per adapter that the server holds at once; ``--max-loras`` is at least ``keep + 1`` per adapter.
        timeout_s: seconds after which a call to the server fails.

    Raises:
        OptionError: the URL is invalid, ``adapters`` is empty, or ``keep`` or ``timeout_s`` is not positive.

    Example:
        >>> from fsdp_runtime.sync import AdapterTransfer
        >>> transfer = AdapterTransfer("http://127.0.0.1:9", "adapters", timeout_s=0.1)
        >>> transfer.served("default", 3)
        'policy-v3'
    """

    def __init__(
        self,
        server: Any,
        directory: str | os.PathLike[str],
        *,
        adapters: Sequence[str] = ("default",),
        name: str = "policy",
        keep: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        if isinstance(adapters, str) or not adapters or len(set(adapters)) < len(adapters):
            raise OptionError(
                f"adapters={adapters!r}: give a tuple of different names of adapters, such as ('default',)"
            )
        if keep < 1 or timeout_s <= 0:
            raise OptionError(f"keep={keep}, timeout_s={timeout_s}: give positive numbers")
        self.client = EngineClient(server, timeout_s=timeout_s) if isinstance(server, str) else server
        # The server's process resolves the path, and its working directory may differ.
        self._directory = Path(os.path.abspath(require_path("directory", directory)))
        self._adapters, self._name, self._keep = tuple(adapters), name, keep
        self._versions: list[int] = []  # on the server, the newest last

    def served(self, adapter: str, version: int) -> str:
        """Return the server's name of a version of an adapter."""
        return f"{self._name}-v{version}" if len(self._adapters) == 1 else f"{self._name}-{adapter}-v{version}"

    def send(self, model: nn.Module, version: int | None = None, *, group: ProcessGroup | None = None) -> AdapterReport:
        """Publish the current adapters; collective over the world: rank 0 talks to the server.

        Args:
            model: the ``PeftModel``, plain or parallelized.
            version: larger than the last version; by default the next number, from 1 on.
            group: a group of all ranks, for messages between hosts; ``None`` for the default group.

        Raises:
            OptionError: vLLM and peft would compute different outputs, the model lacks the adapter, or the version is
                not larger than the last.
            WeightSyncError: the server refused an adapter; raised on every rank.  Earlier versions are still served.
        """
        last = self._versions[-1] if self._versions else 0
        version = last + 1 if version is None else version
        if version <= last:
            raise OptionError(f"version={version}: the server has version {last}; give a larger one")
        for adapter in self._adapters:
            require_servable(model, adapter)
        entries, nbytes = ModelState(model).whole, 0
        for adapter in self._adapters:
            tensors = saved_tensors(model, entries, adapter, embeddings=False)
            nbytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            save_adapter(model, self._directory / self.served(adapter, version), adapter=adapter)
        names = {adapter: self.served(adapter, version) for adapter in self._adapters}
        layers: list[Any] = [layer for layer in lora_layers(base_model(model)) if layer.parameter is not None]
        stacked = {adapter: any(adapter in layer.module.lora_A for layer in layers) for adapter in self._adapters}
        is_first = own_rank() == 0
        on_every_rank(lambda: self._publish(names, stacked) if is_first else None, group)
        self._versions.append(version)
        on_every_rank(lambda: self._withdraw() if is_first else None, group)
        del self._versions[: -self._keep]
        return AdapterReport(version, names, nbytes)

    def _publish(self, names: Mapping[str, str], stacked: Mapping[str, bool]) -> None:
        """Load all adapters of a version on the server, or none if one fails."""
        loaded: list[str] = []
        try:
            for adapter, name in names.items():
                self.client.load_adapter(name, str(self._directory / name), stacked=stacked[adapter])
                loaded.append(name)
        except WeightSyncError as error:
            for name in loaded:
                self._unload(name)
            raise WeightSyncError(
                f"{error}; the server needs --enable-lora, --max-lora-rank and --max-loras that are large enough, "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and {self._directory} on its file system"
            ) from error

    def _unload(self, name: str) -> None:
        """Unload an adapter; ignore the answer, as a restarted server has no adapters."""
        try:
            self.client.unload_adapter(name)
        except WeightSyncError as error:
            _log.warning("%s was not unloaded: %s", name, error)

    def _withdraw(self) -> None:
        """Unload the versions beyond ``keep``, and remove the files of earlier versions."""
        # vLLM may read an adapter's files late: they are removed one version after the adapter is unloaded.
        for version in self._versions[: -self._keep]:
            for adapter in self._adapters:
                self._unload(self.served(adapter, version))
                shutil.rmtree(self._directory / self.served(adapter, version - 1), ignore_errors=True)


def require_servable(model: Any, adapter: str) -> None:
    """Raise :class:`OptionError` unless vLLM and peft compute the same output with an adapter.

    vLLM reads two factors per layer and one scaling for all layers, ``lora_alpha / r``; the two stacked parameters of
    experts are ``experts.base_layer`` (gate and up) and ``experts`` (down).
    """
    require_adapter(model, adapter)
    if problem := next(_problems(model, adapter), None):
        raise OptionError(
            f"adapter {adapter!r} {problem}, which vLLM does not read from an adapter: send merged weights "
            "(stream_weights, WeightTransfer), or train an adapter of plain LoRA on linear layers"
        )


def _problems(model: Any, adapter: str) -> Iterator[str]:
    config = model.peft_config[adapter]
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        yield f"is {config.peft_type}"
    yield from (f"has {name}={value!r}" for name in _BEYOND_FACTORS if (value := getattr(config, name, None)))
    if getattr(config, "bias", "none") != "none":
        yield f"trains biases (bias={config.bias!r})"
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    stacked: dict[str, str] = {}
    for layer in lora_layers(base_model(model)):
        wrapper: Any = layer.module
        if adapter not in wrapper.lora_A:
            continue
        if not math.isclose(wrapper.scaling[adapter], scaling, rel_tol=1e-6):
            yield f"scales {layer.path} by {wrapper.scaling[adapter]:g} and not by lora_alpha / r = {scaling:g}"
        if layer.path.rpartition(".")[2] in ("lm_head", "embed_tokens") or wrapper.lora_embedding_A:
            yield f"adapts {layer.path}"
        if layer.matrix is not None:
            yield f"adapts the parameter {layer.matrix}"
        if layer.parameter is not None:
            stacked[layer.path] = layer.parameter
    for path, parameter in stacked.items():
        outer = path.removesuffix(".base_layer")
        pair, partner = ("gate_up_proj", f"{path}.base_layer") if outer == path else ("down_proj", outer)
        if parameter == pair or stacked.get(partner) != pair:
            yield f"adapts {path}.{parameter} without {pair} in the order of vLLM"
