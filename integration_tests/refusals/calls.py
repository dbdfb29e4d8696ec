"""Calls, models and meshes that are refused before any step is looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_runtime import MeshSpec, adopt_mesh, offload, parallelize, submesh
from fsdp_runtime.mesh import fsdp_mesh
from fsdp_runtime.mesh.experts import expert_view
from fsdp_runtime.parallelism import resolve_parallelism
from fsdp_runtime.steps import FSDP2, ContextAttention, ContextParallel, ExpertParallel, SharedPrefixes, TensorParallel
from fsdp_runtime.steps.context.step import check_context_parallel, replace_attention
from fsdp_runtime.steps.documents.step import check_packing
from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import Own, cpm_ant, facts_with, headed, parallelized, refuse, refuse_on, world

POLICY = FSDP2(mp_policy=MixedPrecisionPolicy())


def _again(axes: dict[str, int] | None = None, **options: Any) -> None:
    with world(**(axes or {})) as mesh:
        model = parallelize(tiny_model("LlamaForCausalLM"), mesh, **options)
        refuse_on(model, mesh)


def _resolved(**options: Any) -> None:
    with world() as mesh:
        resolve_parallelism(Own(), mesh, **options)


def _offloaded() -> None:
    with parallelized(tiny_model("LlamaForCausalLM")) as model:
        offload(model, device="cpu")
        refuse_on(model, MeshSpec().build(device_type="cpu"))


def _over_cp() -> None:
    with world() as mesh:
        model = tiny_model("LlamaForCausalLM")
        replace_attention(model, ContextAttention(mesh.get_group("cp"), "headtail"))
        refuse_on(model, mesh)


def _wrapped() -> None:
    with world() as mesh:
        refuse_on(nn.parallel.DistributedDataParallel(tiny_model("LlamaForCausalLM")), mesh)


def _with_gradients() -> None:
    model = Own()
    next(model.parameters()).grad = torch.ones(next(model.parameters()).shape)
    with world(dp_shard=2) as mesh:
        refuse_on(model, mesh, plan=None)


def _sliced(axes: dict[str, int], **options: Any) -> None:
    with world(**axes) as mesh:
        refuse_on(Own(), mesh["tp"], plan=None, **options)


def _named(*names: str, shape: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def _adopted(*names: str, shape: tuple[int, ...] = (2, 2), view: tuple[str, ...] = ()) -> None:
    with world(tp=4):
        mesh = _named(*names, shape=shape)
        adopt_mesh(mesh, expert_mesh=_named(*view, shape=(4,)) if view else None)


def _elsewhere() -> None:
    with world(tp=2):
        adopt_mesh(DeviceMesh("cpu", [1], mesh_dim_names=("tp",)))


def _part(axis: str, use: Any, **axes: int) -> None:
    with world(**axes) as mesh:
        use(mesh[axis])


def _misnamed() -> None:
    with world(tp=2):
        refuse_on(Own(), _named("x", shape=(2,)))


CASES: Provocations = {
    "fsdp_runtime/values.py": {
        "OptionError: write one of": (
            lambda: _resolved(colour=True),
            lambda: refuse(Own(), plan=None, logits="some"),
            lambda: TensorParallel(towers="some"),  # type: ignore[arg-type]
            lambda: refuse(Own(), {"cp": 2}, plan=None, context_parallel="p2p"),
            lambda: ContextParallel(load_balancer="zigzag"),  # type: ignore[arg-type]
            lambda: refuse(Own(), plan=None, activation_checkpointing="sometimes"),
            lambda: FSDP2(frozen_params="some"),  # type: ignore[arg-type]
        ),
        "OptionError: write True or False": (
            lambda: FSDP2(reshard_after_forward="no"),  # type: ignore[arg-type]
            lambda: refuse(Own(), plan=None, packed_sequences="yes"),
        ),
        "OptionError: is of type str: give MixedPrecisionPolicy(": lambda: FSDP2(mp_policy="bf16"),  # type: ignore[arg-type]
        "OptionError: give a floating dtype": lambda: FSDP2(master_dtype=torch.int8),
    },
    "fsdp_runtime/setup.py": {
        "ModelError: is not a transformers model": (
            lambda: refuse(Own(), {"cp": 2}, plan=None),
            lambda: refuse(Own(), plan=None, packed_sequences=True),
            lambda: refuse(Own(), plan=None, steps=(SharedPrefixes(),)),
        ),
        "ModelError: torch.compile(model) was given": (
            lambda: refuse(torch.compile(tiny_model("LlamaForCausalLM")), {"tp": 2}),  # type: ignore[arg-type]
            lambda: refuse(torch.compile(tiny_model("LlamaForCausalLM")), {"cp": 2}),  # type: ignore[arg-type]
            lambda: refuse(torch.compile(tiny_model("LlamaForCausalLM")), packed_sequences=True),  # type: ignore[arg-type]
        ),
        "ModelError: computes its mask and positions": (
            lambda: refuse(cpm_ant(), {"cp": 2}),
            lambda: refuse(cpm_ant(), packed_sequences=True),
        ),
        "ModelError: no module in the blocks of": (
            lambda: check_context_parallel(facts_with(token_mixers=())),
            lambda: check_packing(facts_with(token_mixers=())),
        ),
        "ModelError: by a token's place in a row": (
            lambda: refuse(headed("roformer", "masked"), {"cp": 2}, plan=None),
            lambda: refuse(headed("roformer", "masked"), plan=None, packed_sequences=True),
        ),
    },
    "fsdp_runtime/keywords.py": {
        "OptionError: give a Compile": lambda: refuse(Own(), plan=None, compile={"backend": "eager"}),
        "OptionError: times ExpertParallel": lambda: refuse(
            Own(), plan=None, steps=(ExpertParallel(), ExpertParallel())
        ),
        "OptionError: use its keyword, as in": lambda: refuse(Own(), plan=None, steps=(FSDP2(),)),
        "OptionError: give steps, such as": lambda: refuse(Own(), plan=None, steps=(FSDP2,)),
    },
    "fsdp_runtime/parallelism.py": {
        "ModelError: not a torch.nn.Module": lambda: refuse(3),
        "ModelError: are offloaded": _offloaded,
        "ModelError: parameters have gradients": _with_gradients,
        "ModelError: already: parallelize a fresh model": (
            lambda: _again(fsdp=POLICY),
            _wrapped,
            lambda: _again(activation_checkpointing="block"),
            _over_cp,
            lambda: _again({"tp": 2}),
        ),
        "OptionError: the mesh has no dp_shard axis": (
            lambda: _sliced({"tp": 4, "ep": 2}),
            lambda: _sliced({"tp": 2}, fsdp=POLICY),
        ),
    },
    "fsdp_runtime/model/structure.py": {"ModelError: has no nn.ModuleList": lambda: refuse(nn.Linear(2, 2), plan=None)},
    "fsdp_runtime/mesh/spec.py": {
        "MeshError: : give a positive integer": (
            lambda: MeshSpec(ep=0),
            lambda: MeshSpec(ep=-1),
            lambda: MeshSpec(tp=0),
        ),
        "MeshError: are both -1": lambda: MeshSpec(tp=-1, dp_shard=-1),
        "MeshError: does not fill the world": lambda: MeshSpec(tp=3).resolve(8),
        "MeshError: device_type=": lambda: MeshSpec().build(device_type="abacus"),
        "MeshError: matches none of the arguments": lambda: _adopted("data", "tp"),
        "MeshError: has no axis names": lambda: _adopted(),
        "MeshError: the axes are in the order": lambda: _adopted("tp", "dp_shard"),
        "MeshError: is not one of the ranks": _elsewhere,
        "MeshError: its axes are": (
            lambda: _part("tp", lambda mesh: submesh(mesh, "ep"), tp=2),
            lambda: _part("tp", lambda mesh: submesh(mesh, "cp"), tp=2),
        ),
        "MeshError: dp_replicate but no dp_shard": lambda: _part("dp_replicate", fsdp_mesh, dp_replicate=2),
        "MeshError: not a DeviceMesh": lambda: refuse_on(Own(), 3),
        "MeshError: name them out of": _misnamed,
    },
    "fsdp_runtime/mesh/experts.py": {
        "MeshError: ep=3 does not divide the 2 ranks": lambda: MeshSpec(tp=2, ep=3).resolve(2),
        "MeshError: the expert mesh has axes": lambda: _adopted("dp_replicate", "tp", view=("experts",)),
        "MeshError: the expert mesh has ranks": lambda: _adopted("dp_replicate", "tp", view=("ep",)),
        "MeshError: has experts over": lambda: _part("tp", expert_view, dp_replicate=2, tp=2, ep=2),
    },
}
