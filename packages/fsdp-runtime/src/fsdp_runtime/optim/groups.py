"""Parameter groups by role: learning rates by layer and role, weight decay for matrices only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn

from fsdp_runtime.errors import OptionError
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.optim.roles import MATRICES, Role, parameter_roles
from fsdp_runtime.sharded.collectives import all_gather_objects
from fsdp_runtime.sharded.model_state import StageRanks
from fsdp_runtime.values import require_one_of
from tp_plans.model_tree import ModelTree, is_at_or_below, parent

#: The roles without weight decay in the recipes of GPT-3, Llama and transformers' trainer.
NO_DECAY: tuple[Role, ...] = ("norm", "bias", "other")
_Settings = tuple[float, float, bool]  # learning rate, weight decay, ``use_muon``


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    layer_decay: float = 1.0,
    lr_scales: Mapping[Role, float] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model, for :class:`Muon` or any optimizer of torch.

    A group has the parameters with one learning rate, one weight decay and one ``use_muon``.  The groups do not depend
    on the mesh.  Frozen parameters are in no group.  Pipeline stages have the same groups, some without parameters: a
    collective over ``pp``.

    Args:
        model: the model; build the groups after ``parallelize``.
        lr: the learning rate of the last block and of the parameters after it.
        weight_decay: the weight decay of all roles but ``"norm"``, ``"bias"`` and ``"other"``.
        adamw_lr: the learning rate of roles without a Muon update, by default ``lr``.
        layer_decay: the factor of the learning rate from each block to the block before it, and to the parameters
            before the first block (ELECTRA, arXiv:2003.10555; BEiT, arXiv:2106.08254).
        lr_scales: a further factor for roles of :func:`parameter_roles`, as ``{"router": 0.1, "embedding": 0.5}``.

    Returns:
        The groups, each with ``params``, ``lr``, ``weight_decay`` and ``use_muon``.

    Raises:
        OptionError: a role is unknown, or ``layer_decay`` is not positive.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime.optim import param_groups
        >>> blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
        >>> model = nn.Sequential(nn.Embedding(8, 4), blocks)
        >>> [(group["lr"], len(group["params"])) for group in param_groups(model, lr=0.4, layer_decay=0.5)]
        [(0.1, 1), (0.2, 1), (0.2, 1), (0.4, 1), (0.4, 1)]
    """
    scales = dict(lr_scales or {})
    for role in scales:
        require_one_of("a role", role, get_args(Role))
    if layer_decay <= 0:
        raise OptionError(f"layer_decay={layer_decay!r}: give a positive factor, at most 1 in the papers")
    roles, distances = parameter_roles(model), _distances(model)
    trained = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    settings: dict[str, _Settings] = {}
    for path in trained:
        role = roles[path]
        use_muon = role in MATRICES
        rate = lr if use_muon or adamw_lr is None else adamw_lr
        rate *= layer_decay ** distances[path] * scales.get(role, 1.0)
        settings[path] = rate, 0.0 if role in NO_DECAY else weight_decay, use_muon
    groups: dict[_Settings, list[Tensor]] = {key: [] for key in _of_all_stages(model, settings).values()}
    for path, parameter in trained.items():
        groups[settings[path]].append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay, "use_muon": use_muon}
        for (rate, decay, use_muon), parameters in groups.items()
    ]


def _of_all_stages(model: nn.Module, settings: dict[str, _Settings]) -> dict[str, _Settings]:
    """Return the settings of the parameters of all pipeline stages, in model order.  Collective over ``pp``."""
    if (stages := StageRanks.of(model)) is None:
        return settings
    gathered = all_gather_objects(stages.line, settings).values()
    whole = {path: key for of_stage in gathered for path, key in of_stage.items()}
    order = {name: place for place, entry in enumerate(stages_of(model).state) for name in entry.names}
    return dict(sorted(whole.items(), key=lambda item: order.get(item[0], len(order))))


def _distances(model: nn.Module) -> dict[str, int]:
    """Return the number of blocks after each parameter in the decoder's stack, plus one before the first block."""
    tree, distances = ModelTree.of(model), {}
    blocks, order = tree.decoder_blocks, {path: place for place, path in enumerate(tree.modules)}
    for path, _ in model.named_parameters():
        inside = [place for place, block in enumerate(blocks) if is_at_or_below(path, block)]
        is_before = bool(blocks) and order[parent(path)] < order[blocks[0]]
        distances[path] = len(blocks) - 1 - inside[0] if inside else len(blocks) * is_before
    return distances
