"""Decide whether a model can run on parts of rows: run a small copy on the ranks of ``cp``.

A model may mix tokens in any module, or take positions from the length of its row.  The copy runs on full rows, then
under ``ContextParallel`` on the ranks' parts, and the results are compared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._transformers_compat.attention import attention_in_force
from fsdp_runtime._transformers_compat.models import original_class
from fsdp_runtime.errors import LayoutError, ModelError
from fsdp_runtime.setup import Setup
from fsdp_runtime.steps.context.sharding import LoadBalancer, SequenceLayout
from fsdp_runtime.wrap import hook_forward
from tp_plans.runtime import computes, on_ranks_of, tiny_model

logger = logging.getLogger(__name__)

#: Outputs agree up to the rounding of float32 in model code.
_BOUND = 1e-5
_ROWS, _TOKENS, _PADDING = 2, 16, 3

#: The first output of every module by path and index, in the order of the calls; the model's outputs come last.
Outputs = dict[tuple[str, int], Tensor]


def verify_context_parallelism(
    load_balancer: LoadBalancer, setup: Setup, apply: Callable[[nn.Module, Setup], None]
) -> None:
    """Check that a model computes the same on parts of rows; collective over ``cp``.  The model is not changed."""
    # Decoders of transformers are not run: their modules outside of token mixers are known to be token-wise. A model
    # without a running small copy is accepted, with a warning. A simulated mesh runs nothing.
    mesh, facts = setup.meshes.cp, setup.facts
    model = facts.row_model
    name = original_class(model).__name__
    of_transformers = original_class(model).__module__.startswith("transformers.")
    if mesh is None or not computes(mesh) or (of_transformers and not facts.attends_both_ways):
        return
    layout = SequenceLayout(2 * mesh.size(), mesh.size(), mesh.get_local_rank(), load_balancer)
    layout = replace(layout, length=-(-_TOKENS // layout.multiple) * layout.multiple)
    try:
        small = _small(model, layout.length, ranks=mesh.size()).to(mesh.device_type)
        expected = _outputs(copy.deepcopy(small), SequenceLayout(layout.length, 1, 0))
    except Exception as error:  # noqa: BLE001 (the code of a model may raise anything)
        logger.warning("%s is not verified over cp, since no small copy of it runs: %s", name, error)
        return

    def difference(_: DeviceMesh) -> list[str]:
        try:
            apply(small, setup)
            return [_difference(_outputs(small, layout), expected, layout)]
        except LayoutError:  # names the inputs that every forward needs
            return [""]
        except Exception as error:  # noqa: BLE001
            return [f"it raises {type(error).__name__}: {error}"]

    differences = [each for (each,) in on_ranks_of(mesh, difference) if each]
    if differences:
        raise ModelError(f"{name} cannot run on a part of a row: in a run of a small copy, {differences[0]}; use cp=1")


def _small(model: Any, length: int, *, ranks: int) -> Any:
    small: Any = tiny_model(model, tp=ranks).model
    implementation = attention_in_force(model.config.get_text_config())
    if attention_in_force(small.config.get_text_config()) != implementation:
        small.set_attn_implementation(implementation)
    positions = getattr(small.config.get_text_config(), "max_position_embeddings", length)
    if positions < length:
        raise ValueError(f"it has {positions} positions, and rows for {ranks} ranks have {length} tokens")
    return small


def _outputs(model: Any, layout: SequenceLayout) -> Outputs:
    outputs: Outputs = {}

    def keep(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        tensors = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                outputs.setdefault((path, index), tensor)

    for path, module in model.named_modules():
        hook_forward(module, "keeps outputs", after=partial(keep, path))
    vocabulary = len(model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(min(3, vocabulary - 1), vocabulary, (_ROWS, layout.length), generator=generator)
    ids, mask = (layout.shard(full).to(model.device) for full in (rows, _padding_mask(layout.length)))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    return outputs


def _padding_mask(length: int) -> Tensor:
    """Return the mask of full rows; the first row ends with padding."""
    mask = torch.ones(_ROWS, length, dtype=torch.long)
    mask[0, -_PADDING:] = 0
    return mask


def _difference(actual: Outputs, expected: Outputs, layout: SequenceLayout) -> str:
    """Return a difference in the outputs of a rank's tokens, else an empty text."""
    real = _padding_mask(layout.length).bool()
    errors: dict[tuple[str, int], float] = {}
    for key, own in actual.items():
        full = expected.get(key)
        if full is None or full.shape[:2] != real.shape or own.shape[:2] != (_ROWS, layout.length // layout.ranks):
            continue
        tokens = layout.shard(real).to(own.device)
        target = layout.shard(full)[tokens].double()
        errors[key] = float((own[tokens].double() - target).abs().max()) / max(float(target.abs().max()), 1e-30)
    own_errors = [error for (path, _), error in errors.items() if not path]
    if not own_errors or all(error <= _BOUND for error in own_errors):
        return ""
    path, _ = next(key for key, error in errors.items() if not error <= _BOUND)
    return f"the output of {path or 'the model'} is off by {max(own_errors):.1e}"
