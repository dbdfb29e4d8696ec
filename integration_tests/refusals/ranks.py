"""What is refused only where ranks differ, or where they run: each function is called on two ranks, and both raise."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers.models.bert.modeling_bert import BertEmbeddings

from coverage.multimodal import multimodal_model
from fsdp_runtime import MeshSpec, parallelize, record_routes
from fsdp_runtime.optim import Muon
from fsdp_runtime.steps import CheckInputs, RouterBalance
from fsdp_runtime.steps.fsdp.missing_media import AbsentMedia
from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import headed, ids, refuse_on


class _Mixed(BertEmbeddings):
    """Embeddings to which those of the token before are added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = super().forward(*args, **kwargs)
        return embedded + embedded.roll(1, dims=1)


def _mixing_embeddings() -> None:
    model = headed("bert", "masked")
    model.bert.embeddings.__class__ = _Mixed
    refuse_on(model, MeshSpec(cp=2).build(device_type="cpu"), plan=None)


class _Towers(nn.Module):
    """A model with two towers."""

    def get_image_features(self, pixel_values: Any) -> None: ...

    def get_audio_features(self, input_features: Any) -> None: ...

    def forward(self, input_ids: Any = None, pixel_values: Any = None, input_features: Any = None) -> None: ...


def _media(*of_ranks: dict[str, Any]) -> None:
    """Let the ranks agree on the media of their rows."""
    model = _Towers()
    hooks = AbsentMedia(model, {"image": [model], "audio": [model]}, [dist.GroupMember.WORLD], ())
    hooks.agree(model, (), of_ranks[dist.get_rank()])


def _media_over_cp() -> None:
    """Give one of the two ranks that share rows their images."""
    mesh, unchecked = MeshSpec(cp=2).build(device_type="cpu"), (CheckInputs("never"),)  # which says so first
    model = parallelize(multimodal_model("llava"), mesh, steps=unchecked)
    images = {"pixel_values": torch.ones(1, 3, 8, 8)} if dist.get_rank() else {}
    model(input_ids=ids(1, 4), position_ids=ids(1, 4), **images)


def _full_rows_over_cp() -> None:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(cp=2).build(device_type="cpu"))
    model(input_ids=ids(1, 4))


def _other_inputs() -> None:
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    model = parallelize(tiny_model("LlamaForCausalLM"), mesh, steps=(CheckInputs(),))
    model(ids(1, 4) + dist.get_rank(), use_cache=False)


def _uneven_dropout() -> None:
    model: Any = tiny_model("LlamaForCausalLM", num_hidden_layers=1, intermediate_size=97).train()
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    parallelize(model, MeshSpec(tp=2).build(device_type="cpu"))
    model(input_ids=ids(1, 4), use_cache=False)


def _head_around() -> None:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(dp_shard=2).build(device_type="cpu"))
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    scale.grad = torch.full_like(scale, 1.0 + dist.get_rank())
    torch.optim.SGD([*model.parameters(), scale]).step()


def _head_of_other_values() -> None:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(tp=2).build(device_type="cpu"))
    model.scale = nn.Parameter(torch.full((), 1.0 + dist.get_rank(), dtype=torch.float64))
    torch.optim.SGD([model.scale]).step()


def _missing_gradient() -> None:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(dp_shard=2).build(device_type="cpu"))
    if dist.get_rank() == 0:
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        weight.grad = torch.zeros_like(weight)
    Muon(model).step()


def _two_meshes() -> None:
    meshes = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0])
    weights = [nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()])) for mesh in meshes]
    Muon([{"params": weights, "use_muon": True}]).step()


def _sharded_by_other_code() -> None:
    model = tiny_model("DeepseekV3ForCausalLM")
    with torch.no_grad(), record_routes(model) as routes:
        model(ids(1, 4), use_cache=False)
    balance = RouterBalance(fully_shard(model, mesh=DeviceMesh("cpu", [0, 1])))
    balance.count(routes)
    balance.step()


PIXELS, SOUND = {"pixel_values": torch.ones(1, 3)}, {"input_features": torch.ones(1, 3)}
CASES: Provocations = {
    "fsdp_runtime/steps/context/inputs.py": {
        "LayoutError: some ranks of cp are given media": _media_over_cp,
    },
    "fsdp_runtime/steps/context/verify.py": {"ModelError: cannot run on a part of a row": _mixing_embeddings},
    "fsdp_runtime/steps/fsdp/missing_media.py": {
        "ModelError: and others have none": lambda: _media(PIXELS, {}),
        "ModelError: have different media": lambda: _media(
            {"input_ids": ids(1, 4), **PIXELS}, {"input_ids": ids(1, 4), **SOUND}
        ),
    },
    "fsdp_runtime/steps/guards/calls.py": {
        "ModelError: different gradients on the ranks": _head_around,
        "ModelError: draw it after the same seed": _head_of_other_values,
    },
    "fsdp_runtime/optim/muon_plan.py": {"OptionError: are on meshes of the ranks (0,) and (0, 1)": _two_meshes},
    "fsdp_runtime/sharded/collectives.py": {"OptionError: is 'present' on rank 0 and 'missing' on": _missing_gradient},
    "fsdp_runtime/steps/random_states.py": {"ModelError: drew different amounts": _uneven_dropout},
    "fsdp_runtime/steps/routing/balance.py": {"ModelError: was sharded by other code": _sharded_by_other_code},
    "fsdp_runtime/steps/guards/check_inputs.py": {
        "LayoutError: were given the same tokens": _full_rows_over_cp,
        "LayoutError: were given different inputs": _other_inputs,
    },
}
