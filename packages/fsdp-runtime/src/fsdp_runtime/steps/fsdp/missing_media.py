"""Ranks without image, video or audio take part in the collectives of the towers, too.

FSDP2 gathers a tower's blocks when they are called and reduces their gradients after backward, and every rank of the
mesh must take part.  Before a forward the ranks exchange the media of their rows.  A rank without a medium runs its
tower on media of another rank's shapes, and adds none of the result: the parameters get gradients of zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_runtime._torch_compat import tree_leaves
from fsdp_runtime._transformers_compat.models import MEDIA_METHODS, original_class
from fsdp_runtime.errors import ModelError
from fsdp_runtime.memory.unshard import is_held
from fsdp_runtime.model.structure import ModelStructure
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects, all_reduce_over, ranks_of
from fsdp_runtime.wrap import hook_forward, hook_model
from tp_plans.model_tree import is_at_or_below

#: The media of a method that does not declare its arguments.
_FIRST = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
#: The value of all pixels and samples in place of absent media: some models drop images of zeros.
_FILL = 0.5
#: Parts of the names of other media, such as proteins, and of inputs that no tower reads.
_OTHER, _NO_MEDIA = ("pixel", "patches", "values", "features", "_ids"), ("position", "type_ids", "past_")
#: Results of a tower that models add to their tokens where its features are projected.  Parameters that only other
#: results read (logits of speakers, a loss of codes) have no gradient.
_ADDED = {"pooler_output", "deepstack_features", "visual_indicator_features"}
#: Results that no model adds.
_INTERMEDIATE = {"hidden_states", "attentions"}


@dataclass(eq=False)
class AbsentMedia:
    """Hooks of a model that run its towers where a rank has no media and another rank has."""

    # One all-reduce of a few bytes, and one wait for it, per forward and mesh axis. ``owners`` are by medium the
    # modules with its method, such as ``get_image_features``, outermost first. ``projectors`` are parameters that some
    # models use after the method.
    model: nn.Module
    owners: Mapping[str, Sequence[nn.Module]]
    groups: Sequence[ProcessGroup]
    projectors: Sequence[str]
    absent: dict[str, dict[str, Any]] = field(default_factory=dict)

    def agree(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find the media that other ranks have and this rank lacks; a forward pre-hook of the model."""
        self.absent = {}
        if not torch.is_grad_enabled() and all(
            is_held(module) for module in self.model.modules() if isinstance(module, FSDPModule)
        ):
            return  # no collective of a tower follows, and ranks that generate may call the model at other times
        inputs = _arguments(module, args, kwargs)
        local = {medium: _media(medium, owners, inputs) for medium, owners in self.owners.items()}
        flags = [inputs.get("input_ids") is None, *(bool(media) for media in local.values())]
        device = next((value.device for value in inputs.values() if isinstance(value, Tensor)), torch.device("cpu"))
        counts = torch.tensor([*flags, *(not flag for flag in flags)], dtype=torch.int32, device=device)
        counts = all_reduce_over(self.groups, counts, dist.ReduceOp.MAX)
        if any(dist.get_backend(group) == "fake" for group in self.groups):  # of a dry run
            return
        (embedded, *some), (_, *lacking) = counts.view(2, -1).bool().tolist()
        mixed = [medium for medium, has, lacks in zip(local, some, lacking, strict=True) if has and lacks]
        if not mixed:
            return
        present = [medium for medium, has in zip(local, some, strict=True) if has]
        without = [medium for medium in mixed if not self.owners[medium]]
        if embedded or without:
            name = original_class(self.model).__name__
            method = MEDIA_METHODS.get(without[0], "method for them") if without else ""
            why = f"{name} has no {method}" if without else "a rank got no input_ids"
            raise ModelError(
                f"some data-parallel ranks have rows with media ({', '.join(mixed)}) and others have none. The others "
                f"cannot join the collectives of the towers: {why}. Give every rank rows with media"
            )
        if "audio" in present and len(present) > 1:
            raise ModelError(
                f"data-parallel ranks have different media: {', '.join(present)} in some rows, "
                f"{', '.join(mixed)} not on every rank. Ranks would run the towers in different orders: give every "
                "rank rows with the same media, or batches with audio and batches with images"
            )
        held = {medium: _template(local[medium]) for medium in mixed if local[medium]}
        by_rank = all_gather_objects(ModelRanks(self.groups), held).values()
        templates = {medium: template for of_rank in reversed([*by_rank]) for medium, template in of_rank.items()}
        self.absent = {medium: templates[medium] for medium in mixed if not local[medium]}

    def run(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        """Run the towers of absent media, and add zero to the token embeddings; a forward hook of the embedding."""
        if not self.absent:
            return None
        absent, self.absent = self.absent, {}
        nothing: list[Tensor] = []
        for medium, template in absent.items():
            media = {name: _filled(value, output) for name, value in template.items()}
            features = getattr(self.owners[medium][0], MEDIA_METHODS[medium])(**media, return_dict=True)
            projected = features.get("pooler_output") is not None
            names = _ADDED if projected else {*features} - _INTERMEDIATE
            used = {name: value for name, value in features.items() if name in names}
            projectors = () if projected else map(self.model.get_parameter, self.projectors)
            leaves = tree_leaves((used, *projectors))
            trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            local = (leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in trained)
            nothing += [leaf.flatten()[:0].sum() for leaf in local]  # with gradients of zero
        if not nothing:  # frozen towers
            return None
        return output + torch.stack([value.to(output.dtype) for value in nothing]).sum()


def apply_absent_media(model: nn.Module, structure: ModelStructure, mesh: DeviceMesh) -> None:
    """Let ranks without media take part in the collectives of towers that FSDP2 shards over several ranks."""
    tree = structure.tree
    owners = _media_owners(model, several_stacks=len(tree.stacks) > 1)
    if mesh.size() == 1 or tree.embedding is None or not owners:
        return
    projectors = [name for name in tree.parameters if "projector" in name and not is_at_or_below(name, tree.root)]
    hooks = AbsentMedia(model, owners, ranks_of(mesh).groups, projectors)
    hook_model(model, "agrees on the media of all ranks", hooks.agree, first=True)
    hook_forward(model.get_submodule(tree.embedding), "runs towers without media", after=hooks.run)


def _media_owners(model: nn.Module, *, several_stacks: bool) -> dict[str, list[nn.Module]]:
    """Return the modules that run the tower of each medium; inputs of towers without such methods have none."""
    takes = signature(type(model).forward).parameters
    owners = {
        medium: [module for module in model.modules() if callable(getattr(module, method, None))]
        for medium, method in MEDIA_METHODS.items()
    }
    media = {medium: modules for medium, modules in owners.items() if modules or _FIRST[medium] in takes}
    return media or {name: [] for name in takes if several_stacks and _may_be_media(name)}


def _may_be_media(name: str) -> bool:
    is_text = name in ("input_ids", "decoder_input_ids") or any(part in name for part in _NO_MEDIA)
    return not is_text and any(part in name for part in _OTHER)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = list(signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _media(medium: str, owners: Sequence[nn.Module], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a medium's method, empty if the first argument, the media, is absent."""
    methods = (getattr(owner, MEDIA_METHODS[medium]) for owner in owners)
    declared = [*dict.fromkeys(name for method in methods for name in signature(method).parameters)]
    declared = [name for name in declared if name not in ("args", "kwargs")]
    names = [name for name in declared if inputs.get(name) is not None]
    first = declared[0] if declared else _FIRST.get(medium, medium)
    return {name: inputs[name] for name in names or [first]} if inputs.get(first) is not None else {}


def _template(media: Mapping[str, Any]) -> dict[str, Any]:
    """Return media without values: floating tensors as shapes, other arguments unchanged."""
    tensors = {name: value for name, value in media.items() if isinstance(value, Tensor)}
    return {**media, **{n: each.to("meta" if each.is_floating_point() else "cpu") for n, each in tensors.items()}}


def _filled(value: Any, like: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.full_like(value, _FILL, device=like.device) if value.is_meta else value.to(like.device)
