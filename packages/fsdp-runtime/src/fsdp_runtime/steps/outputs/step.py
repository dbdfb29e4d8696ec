"""Outputs of a model that is sharded over ``tp``: full if the caller or the model's code reads full tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.outputs.full_tensors import (
    gather_logits_for_labels,
    gather_logits_in_generate,
    refuse_attention_maps,
    return_full_hidden_states,
)


@dataclass(frozen=True)
class Outputs(Step[None]):
    """Gather logits in ``generate`` and for ``labels``, and hidden states; refuse attention maps."""

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Put the hooks around a model that tensor parallelism has sharded."""
        if setup.plan is None or setup.meshes.tp is None:
            return
        gather_logits_in_generate(setup.facts.base_model, setup.meshes.tp)
        gather_logits_for_labels(setup.facts.base_model)
        return_full_hidden_states(model, over_cp=setup.meshes.cp is not None)
        refuse_attention_maps(model, "tp")
