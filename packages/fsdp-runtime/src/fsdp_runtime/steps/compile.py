"""``torch.compile`` of each block, in place, and async tensor parallelism.

For async tensor parallelism, Inductor splits the collectives of sequence parallelism (an all-gather before a product, a
reduce-scatter after it) into pipelines over symmetric memory (torchtitan's "async TP"; CUDA with peer access).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import MICRO_PIPELINE, enable_symmetric_memory
from fsdp_runtime._transformers_compat.models import asks_for, disable_cache, recorded_outputs
from fsdp_runtime.errors import BackendError, OptionError
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.compiled_blocks import compile_again, compile_blocks, leave_to_python
from fsdp_runtime.steps.recomputation import recomputes
from fsdp_runtime.values import require_bool
from fsdp_runtime.wrap import hook_forward

logger = logging.getLogger(__name__)

#: Graphs per piece of code before torch leaves the rest to Python; torch's limit is 8.  All decoder layers of
#: transformers share the counted code (``GradientCheckpointingLayer``).  A kind of block has a graph for the first
#: length and a graph for any length, both with and without gradients, and again where ``tp`` divides the length.
RECOMPILE_LIMIT = 64


def async_compile_options(
    tp_mesh: DeviceMesh | None, compile_options: Mapping[str, Any], *, sequence_parallel: bool
) -> dict[str, Any]:
    """Return the keywords of ``torch.compile`` for async tensor parallelism; raise if nothing would overlap."""
    if tp_mesh is None or not sequence_parallel:
        raise OptionError(
            "async_tensor_parallel overlaps the collectives of sequence parallelism: it needs a mesh with tp larger "
            "than 1 and sequence_parallel=True"
        )
    options = dict(compile_options)
    if options.get("backend", "inductor") != "inductor":
        raise OptionError("async_tensor_parallel is a pass of Inductor: it needs compile=True or backend='inductor'")
    if tp_mesh.device_type != "cuda":
        raise BackendError(
            f"async_tensor_parallel needs CUDA devices with peer access, and the mesh is on {tp_mesh.device_type}: "
            "leave it off, which does not change the results"
        )
    if options.get("mode") is not None:  # torch.compile takes a mode or options
        raise OptionError(
            f"async_tensor_parallel cannot be combined with mode={options['mode']!r}: give options instead of a mode"
        )
    return {**options, "options": {**options.get("options", {}), MICRO_PIPELINE: True}}


@dataclass(frozen=True)
class Compile(Step[Mapping[str, Any]]):
    """Compile every block with ``nn.Module.compile``, in place.

    Names and the state dict do not change, and blocks of one class share their compiled code: one graph, with the
    collectives of tensor parallelism and the recomputations of activation checkpointing in it.  Its inputs and outputs
    are plain tensors; DTensors are unwrapped around it.  Hooks of a block, such as FSDP2's, run in Python around the
    graph (the order of torchtitan's ``parallelize_llama``).

    ``use_cache`` of the model's configs is set to ``False``: a key/value cache has an entry for each layer, so the
    compiler would make one graph per block until it gives up.  ``model(..., use_cache=True)`` and ``generate``
    still have a cache.  From torch 2.13 on, ``recompile_limit`` is 64 unless the options have one.

    A forward that is asked for router logits, hidden states or attention maps runs its blocks without the compiler.
    Compiled code would leave out the outputs that transformers records.

    Args:
        options: keywords of ``torch.compile``.
        async_tensor_parallel: let the compiler overlap products with the collectives of sequence parallelism; needs
            CUDA.

    Example:
        >>> from torch import nn
        >>> from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
        >>> from fsdp_runtime.steps import Compile
        >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))
        >>> model = parallelize(model, MeshSpec().build(device_type="cpu"), compile=Compile({"backend": "eager"}))
        >>> describe_parallelism(model).compiled
        ('0.0',)
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    async_tensor_parallel: bool = False

    def __post_init__(self) -> None:
        require_bool("async_tensor_parallel", self.async_tensor_parallel)

    @property
    def joins_gradients(self) -> bool:
        """The backward of a compiled block is one node."""
        return True

    def check(self, setup: Setup) -> Mapping[str, Any]:
        """Return the keywords of ``torch.compile``."""
        options = self.options
        if self.async_tensor_parallel:
            options = async_compile_options(setup.meshes.tp, options, sequence_parallel=setup.sequence_parallel)
        try:
            nn.Identity().compile(**options)  # nothing is compiled
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise OptionError(f"compile={dict(options)!r} is refused by torch.compile: {reason}") from error
        by_mode = options.get("mode") in ("reduce-overhead", "max-autotune")
        if setup.is_sharded and (by_mode or options.get("options", {}).get("triton.cudagraphs")):
            raise OptionError(
                f"compile={dict(options)!r} records CUDA graphs, which replay the addresses of one forward: FSDP2 "
                "allocates gathered parameters in each forward, tp, cp and ep make new tensors of their shards, and "
                "each replay would copy every parameter. Use 'default' or 'max-autotune-no-cudagraphs', or a mesh with "
                "one rank"
            )
        known = "recompile_limit" in inspect.signature(torch.compile).parameters  # not before torch 2.13
        return {"recompile_limit": RECOMPILE_LIMIT, **options} if known else options

    def apply(self, model: nn.Module, setup: Setup, checked: Mapping[str, Any]) -> None:
        """Compile the blocks."""
        if self.async_tensor_parallel and setup.meshes.tp is not None:
            enable_symmetric_memory(setup.meshes.tp.get_group())
        if setup.sequence_parallel and setup.meshes.tp is not None:
            # The key of code that torch stores on disk has the full shape of a DTensor, not the local shape (torch 2.10
            # to 2.13): if ``tp`` does not divide a sequence, a later run would get the code of a rank with another
            # local length.
            tag, config = f"[tp rank {setup.meshes.tp.get_local_rank()}]", torch.compiler.config
            if tag not in config.cache_key_tag:
                config.cache_key_tag += tag
        blocks = [model.get_submodule(path) for path in setup.structure.blocks]
        # A recomputation inside of a graph keeps no random state: Inductor and AOTAutograd have to keep it (torch 2.10
        # to 2.13, ``TagActivationCheckpoint``). Others, such as ``"eager"``, would recompute with other dropout.
        backend = checked.get("backend", "inductor")
        if not (isinstance(backend, str) and (backend == "inductor" or backend.startswith("aot_"))):
            for module in (module for block in blocks for module in filter(recomputes, block.modules())):
                runtime_state(module).recomputes_in_python = True
        compile_blocks(blocks, checked)
        for module in filter(recorded_outputs, model.modules()):
            effect, recorded = "runs blocks in Python where their outputs are recorded", _RecordedForward(blocks)
            hook_forward(module, effect, before=recorded.before, after=recorded.after, always=True)
        disable_cache(model)
        logger.info("torch.compile: %d blocks", len(setup.structure.blocks))


@dataclass(eq=False)
class _RecordedForward:
    """Runs blocks uncompiled in a forward that is asked for outputs of submodules."""

    # transformers registers hooks on them at the first such forward. Compiled code does not look for new hooks
    # (``torch._dynamo.config.skip_nnmodule_hook_guards``), so their records would be missing.

    blocks: Sequence[nn.Module]
    calls: Mapping[nn.Module, Any] = field(default_factory=dict)

    def before(self, model: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        if any(asks_for(model, kwargs, output) for output in recorded_outputs(model)):
            self.calls = leave_to_python(self.blocks)

    def after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        compile_again(self.calls)
        self.calls = {}
