"""The facts about a model, the meshes and the decisions that the steps of one call of ``parallelize`` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from fsdp_runtime._peft_compat import LoraLayer, base_model, lora_layers, model_of_rows
from fsdp_runtime._transformers_compat.attention import attention_in_force
from fsdp_runtime._transformers_compat.models import is_masked_language_model, is_transformers_model
from fsdp_runtime.errors import ModelError
from fsdp_runtime.model import positions
from fsdp_runtime.model import token_mixers as mixers
from fsdp_runtime.model.structure import ModelStructure, inspect_model
from tp_plans import Plan

T = TypeVar("T")


def _of_structure(function: Callable[[ModelStructure], T]) -> cached_property[T]:
    return cached_property(lambda facts: function(facts.structure))


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """Facts about a model.  Each is computed once per call, before the first step changes the model."""

    model: nn.Module
    structure: ModelStructure

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        """Inspect a model."""
        return cls(model, inspect_model(model))

    @cached_property
    def base_model(self) -> Any:
        """The model without peft's wrapper: the base model of a ``PeftModel``, or the model itself."""
        return base_model(self.model)

    @cached_property
    def adapters(self) -> tuple[LoraLayer, ...]:
        """The layers of the base model with low-rank adapters."""
        return tuple(lora_layers(self.base_model))

    @cached_property
    def row_model(self) -> Any:
        """The module that gets the rows of a call: a ``PeftModel`` that adds virtual tokens, else the base model."""
        return model_of_rows(self.model)

    @property
    def name(self) -> str:
        """The class of the row model, for messages."""
        return type(self.row_model).__name__

    @cached_property
    def of_transformers(self) -> bool:
        """Whether the row model is a ``PreTrainedModel``."""
        return is_transformers_model(self.row_model)

    @cached_property
    def text_config(self) -> Any:
        """The config of the language model of a transformers model."""
        return self.row_model.config.get_text_config()

    @cached_property
    def attention(self) -> str:
        """The attention implementation of a transformers model, such as ``"sdpa"``."""
        return str(attention_in_force(self.text_config))

    #: The modules in the decoder's blocks that mix tokens, with their isolation of documents.
    token_mixers = _of_structure(mixers.token_mixers)
    #: The path of a module in the decoder's blocks that makes its own masks; they cannot be restricted.
    makes_own_masks = _of_structure(mixers.makes_own_masks)
    #: The derivation of missing absolute positions from token ids or padding.
    derived_positions = _of_structure(positions.derived_positions)
    #: Whether the model cuts the padding mask to its last tokens, one per input embedding.
    cuts_padding_mask = _of_structure(positions.cuts_padding_mask)
    #: The table of absolute positions that is looked up by a row's length alone.
    ignores_position_ids = _of_structure(positions.ignores_position_ids)
    #: The module that multiplies the token embeddings with the padding mask.
    masks_embeddings = _of_structure(positions.masks_embeddings)
    #: The reason why the model needs full rows, else ``None``.
    needs_full_row = _of_structure(positions.needs_full_row)

    @cached_property
    def attends_both_ways(self) -> bool:
        """Whether tokens attend to later tokens: in an encoder, or in a decoder by its config."""
        config = self.text_config
        by_config = (
            getattr(config, "is_causal", True) is False
            or getattr(config, "use_bidirectional_attention", None) in (True, "all")
            or is_masked_language_model(config)
        )
        return by_config or any(mixers.is_bidirectional(mixer.module) for mixer in self.token_mixers)

    @cached_property
    def bidirectional_without_mask(self) -> mixers.TokenMixer | None:
        """A bidirectional token mixer: an attention mask cannot separate its packed documents."""
        mixer = next((mixer for mixer in self.token_mixers if mixer.isolation != "mask"), None)
        return mixer if mixer is not None and self.attends_both_ways else None

    def require_not_compiled(self) -> None:
        """Refuse a result of ``torch.compile``: torch would trace hooks of copies in it."""
        if type(self.model).__name__ == "OptimizedModule":
            raise ModelError(
                "torch.compile(model) was given: give the model itself, with compile=True, which compiles each block"
            )

    def require_transformers(self, fix: str) -> None:
        """Check that the model is a transformers model; ``fix`` names the call for other models."""
        self.require_not_compiled()
        if not self.of_transformers:
            raise ModelError(f"{self.name} is not a transformers model, whose attention is known: {fix}")

    def require_known_positions(self, fix: str) -> None:
        """Check that the token mixers are known and use positions; ``fix`` names the call for other models."""
        if (path := self.makes_own_masks) is not None:
            raise ModelError(f"{path} of {self.name} computes its mask and positions from the length of a row: {fix}")
        if not self.token_mixers:
            raise ModelError(
                f"no module in the blocks of {self.name} takes an attention mask, a cache or a state, so its token "
                f"mixers are unknown: {fix}"
            )
        if (path := self.ignores_position_ids) is not None:
            raise ModelError(f"{self.name} looks up {path} by a token's place in a row, not by position_ids: {fix}")


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The axes of a call; ``None`` for an axis that the call does not use, or with one rank."""

    tp: DeviceMesh | None = None  # layers are sharded over it
    cp: DeviceMesh | None = None  # sequences are sharded over it
    pp: DeviceMesh | None = None  # blocks are divided over it
    ep: DeviceMesh | None = None  # experts are divided over it
    shared: DeviceMesh | None = None  # its ranks have the same tokens, and each sends a part of them to experts
    fsdp: DeviceMesh | None = None  # the axis, or the two axes (replicas, shards), of FSDP2
    expert_fsdp: DeviceMesh | None = None
    batches: int | None = None  # ranks with different batches; ``None`` where FSDP2's mean is right
    root: DeviceMesh | None = None  # all axes of the call, ``None`` where the axes were given one by one
    device_type: str = "cpu"


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """The input of ``check`` and ``apply`` of every step of one call."""

    facts: ModelFacts
    meshes: Meshes
    steps: tuple[object, ...]  # every step of the call, in order
    packed_sequences: bool = False  # the documents of packed rows are isolated
    shared_prefixes: bool = False  # the samples of a row may share prefixes
    packed_base: bool = False  # frozen weights are packed bytes
    sequence_parallel: bool = False  # activations between blocks are sharded over ``tp`` on the sequence
    given_tp: DeviceMesh | None = None  # stays if a step removes ``tp`` from ``meshes``
    plan: Plan | Mapping[str, ParallelStyle] | None = None  # of ``tp``; torch's styles through ``nemo`` only
    expert_plan: Plan | None = None  # rules of ``ep``, ``None`` where experts are not dispatched
    tp_plan: Plan | None = None  # without the rules of the axis ``ep``

    @property
    def structure(self) -> ModelStructure:
        """The model's blocks, embedding and head."""
        return self.facts.structure

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks share the model's layers, tokens, experts or parameters."""
        meshes = self.meshes
        return any(mesh is not None for mesh in (meshes.tp, meshes.cp, meshes.pp, meshes.ep, meshes.fsdp))

    @property
    def tp(self) -> int:
        """The number of ranks that a layer is sharded over, 1 without a plan."""
        return 1 if self.meshes.tp is None else self.meshes.tp.size()

    def expert_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules by path that get their tokens dispatched over ``ep``."""
        plan = self.expert_plan
        return {} if plan is None else {path: module for path, module in model.named_modules() if plan.match(path)}

    def step(self, kind: type[T]) -> T | None:
        """Return the call's step of a class, if it has one."""
        return next((step for step in self.steps if isinstance(step, kind)), None)

    def required(self, kind: type[T]) -> T:
        """Return the call's step of a class; every call of ``parallelize`` has this step."""
        return next(step for step in self.steps if isinstance(step, kind))
