"""Questions to a vLLM worker that its HTTP server passes on (``--worker-extension-cls``, ``/collective_rpc``)."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise

import tp_plans
from fsdp_runtime.sharded.boxes import block_view
from vllm_gloo import cpu_repack, gpt_oss, reload
from vllm_gloo._vllm_compat import drop_pending, processing_replaced
from with_vllm.checksums import checksum


class Questions:
    """Mixed into vLLM's worker class."""

    def repack(self, wanted: str) -> None:
        """Switch off, or on again, what packs stale copies anew after an update, and note what it packs."""
        self.packed: list[str] = []

        def noting(model: torch.nn.Module) -> list[str]:
            self.packed = cpu_repack.repack(model) if wanted == "on" else []
            return self.packed

        reload.repack = noting

    def repacked(self) -> list[str]:
        """The modules that the last update packed anew."""
        return self.packed

    def held(self, question: str) -> tuple[str, dict[str, str]]:
        """The question, and checksums of the weights that this worker loaded last, by their names."""
        return question, {name: checksum(tensor) for name, tensor in self.weight_transfer_engine._current or []}

    def compare_layout(self, tensors: str) -> list[str]:
        """Load random checkpoint tensors through vLLM's own loaders, and compare each parameter with ``engine_layout``.

        Args:
            tensors: JSON of names and shapes.

        Returns:
            What differs, as text; the last entry counts the parameters that were compared.
        """
        shapes = {name: tuple(shape) for name, shape in json.loads(tensors).items()}
        full = {name: _values(name, shape) for name, shape in shapes.items()}
        model = self.model_runner.model
        biases = {name: tensor.clone() for name, tensor in model.named_parameters() if name.endswith("bias")}
        with set_current_vllm_config(self.vllm_config):
            stored = {name: tensor.clone() for name, tensor in self._load(full).items()}
        for name, tensor in biases.items():  # a reload leaves them in place
            model.get_parameter(name).data.copy_(tensor)
        config = self.model_config.hf_text_config
        size = tp_plans.transfer.EngineSize(
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            tp=self.parallel_config.tensor_parallel_size,
        )
        described = {name: tp_plans.transfer.CheckpointTensor(shape, "float32") for name, shape in shapes.items()}
        layout = tp_plans.transfer.engine_layout(described, size, engine="vllm")
        expected: dict[str, Tensor] = {}
        problems = []
        for name, values in full.items():
            for block in layout.stored(self.rank, name):
                local = block.local if block.local in stored else _renamed(block.local)
                if gpt_oss.sinks_parameter(model, name) is not None:
                    continue  # no loader stores them
                if local not in stored:
                    problems.append(f"{name} belongs into {block.local}, which vLLM does not have")
                    continue
                target = expected.setdefault(local, torch.full_like(stored[local], _UNTOUCHED))
                part = values[tuple(slice(start, stop) for start, stop in block.box)]
                block_view({block.local: target}, name, block, block.box).copy_(part)
        # vLLM fills the rows of a padded vocabulary with zeros; they are no part of the checkpoint.
        for name, tensor in stored.items():
            if name not in expected:
                problems.append(f"vLLM's {name} gets nothing")
            elif not torch.equal(torch.where(expected[name] == _UNTOUCHED, tensor, expected[name]), tensor):
                problems.append(f"{name} differs")
            elif extra := int(((expected[name] == _UNTOUCHED) & ~_padding(tensor)).sum()):
                problems.append(f"{name} has {extra} elements that the layout does not fill")
        return [*problems, f"{len(stored)} parameters of {sum(t.numel() for t in stored.values())} elements"]

    def _load(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """What each parameter holds after loading and before any packing, by its name."""
        model = self.model_runner.model
        paths = {id(module): path for path, module in model.named_modules()}
        stored: dict[str, Tensor] = {}

        def keep(layer: torch.nn.Module, info: Any) -> None:
            layerwise.materialize_layer(layer, info)
            for name, tensor in layer.named_parameters(recurse=False):
                tensor.data.fill_(_UNTOUCHED)
                stored[f"{paths[id(layer)]}.{name}"] = tensor.data
            for name, arguments in info.loaded_weights:
                parameter = getattr(layer, name)
                arguments.arguments["param"] = parameter
                layerwise._get_original_loader(parameter)(*arguments.args, **arguments.kwargs)
            info.loaded_weights.clear()

        initialize_layerwise_reload(model)
        try:
            with processing_replaced(keep):
                for name, tensor in full.items():
                    for part in gpt_oss.loadable_parts(model, name, tensor):
                        model.load_weights([part])
            for layer in model.modules():
                info = layerwise.get_layerwise_info(layer)
                if info.can_load() and info.loaded_weights:  # a padded layer is never complete
                    keep(layer, info)
        finally:
            drop_pending(model, self.model_config)
        return stored


_UNTOUCHED = -777.0


def _renamed(path: str) -> str:
    """A parameter's path where vLLM names modules otherwise than transformers, as in gpt-oss."""
    return path.replace(".self_attn.", ".attn.").replace(".embed_tokens.", ".embedding.")


def _padding(tensor: Tensor) -> Tensor:
    """Where the padding of a vocabulary may lie: zeros, or what nothing was written to."""
    return (tensor == 0) | (tensor == _UNTOUCHED)


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that differ between tensors and places."""
    generator = torch.Generator().manual_seed(hash_of(name))
    return torch.randn(shape, generator=generator)


def hash_of(name: str) -> int:
    """A number of a name that is the same in every process."""
    return int.from_bytes(name.encode()[-7:], "little") ^ len(name)
