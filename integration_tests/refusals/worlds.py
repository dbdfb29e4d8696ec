"""Models and meshes in one process on which calls are refused; collectives of several ranks return at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from coverage.heads import head_model, head_rows
from coverage.table import entries, tiny_model
from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.dry_run.trace.fake_world import fake_world
from fsdp_runtime.setup import ModelFacts
from harness import models


@contextmanager
def world(**axes: int) -> Iterator[DeviceMesh]:
    """Make this process the first rank of a mesh."""
    with fake_world(MeshSpec(**axes), rank=0) as mesh:
        yield mesh


def refuse(model: Any, axes: Mapping[str, int] | None = None, /, **options: Any) -> None:
    """Call ``parallelize``, and check that the model is as before."""
    with world(**(axes or {})) as mesh:
        refuse_on(model, mesh, **options)


def refuse_on(model: Any, mesh: Any, **options: Any) -> None:
    """The same on any mesh."""
    before = _state(model)
    try:
        parallelize(model, mesh, **options)
    finally:
        assert _state(model) == before, "the model was changed"


def _state(model: Any) -> list[Any]:
    """The classes, hooks and parameters of a model."""
    if not isinstance(model, nn.Module):
        return []
    modules = [
        (path, type(each), vars(each).get("forward"), len(each._forward_pre_hooks), len(each._forward_hooks))
        for path, each in model.named_modules()
    ]
    return [*modules, *((path, id(each), each._version) for path, each in model.named_parameters())]


@contextmanager
def parallelized(model: nn.Module, axes: Mapping[str, int] | None = None, /, **options: Any) -> Iterator[Any]:
    """A model that was parallelized, in its world."""
    with world(**(axes or {})) as mesh:
        yield parallelize(model, mesh, **options)


class Tree(nn.Module):
    """A module of given attributes, shapes of parameters, and children."""

    def __init__(
        self,
        *,
        attributes: Mapping[str, Any] | None = None,
        parameters: Mapping[str, tuple[int, ...]] | None = None,
        **children: Any,
    ) -> None:
        super().__init__()
        for name, value in (attributes or {}).items():
            setattr(self, name, value)
        for name, shape in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        for name, child in children.items():
            self.add_module(name, child)


class Own(nn.Module):
    """A model of one's own: an embedding, blocks and a head; ``more`` stands before the blocks.

    Args:
        change: what the forward returns, of the model and the hidden states.
        more: further modules.
    """

    def __init__(self, change: Any = None, **more: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        for name, module in more.items():
            self.add_module(name, module)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)) for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.change = change

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def forward(self, ids: Tensor, **_: Any) -> Any:
        """Score tokens."""
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden) if self.change is None else self.change(self, hidden)


def row(name: str, **changes: Any) -> Any:
    """A tiny model of a row of the coverage table."""
    model = tiny_model(entries()[name])
    for field, value in changes.items():
        setattr(model.config.get_text_config(), field, value)
    return model


def headed(model_type: str, head: str) -> Any:
    """A tiny encoder, or a model with another head."""
    return head_model(next(each for each in head_rows() if (each.model_type, each.head) == (model_type, head)))


def cpm_ant() -> Any:
    """A model that makes masks from the length of a row."""
    config = transformers.CpmAntConfig(hidden_size=8, num_attention_heads=2, dim_head=4, dim_ff=8, num_hidden_layers=1)
    return transformers.CpmAntForCausalLM(config)


def with_attention(implementation: str) -> Any:
    """A model whose attention is computed in another way."""
    model: Any = models.tiny_model("LlamaForCausalLM")
    model.config._attn_implementation = implementation
    return model


def facts_with(**facts: Any) -> Any:
    """Facts of a model, some of which no tiny model of transformers has."""
    found = ModelFacts.of(models.tiny_model("LlamaForCausalLM"))
    vars(found).update(facts)  # where they are cached
    return found


def ids(*shape: int) -> Tensor:
    """Token ids that count up from 3."""
    return torch.arange(3, 3 + math.prod(shape)).view(shape)
