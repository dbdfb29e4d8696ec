"""NeMo Automodel's parallelizer on our plans against one process; run by ``nox -s trainers``.

Its recipes need CUDA; what they call is driven here as they call it: ``MeshContext.build``, ``parallelize_model`` of a
model on the meta device, ``initialize_model_weights``, ``ContextParallelSharder`` and the scales of loss and gradients.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_automodel._transformers.capabilities import ModelSupports
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.distributed import model_parallelizer
from nemo_automodel.components.distributed.config import (
    FSDP2Config,
    MoEParallelizerConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
)
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from nemo_automodel.components.distributed.context_parallel import utils as context_parallel
from nemo_automodel.components.distributed.context_parallel.sharder import shard_batch_identity
from nemo_automodel.components.distributed.cp_vision_frame_shard import CpVisionFrameShardingConfig
from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
from nemo_automodel.components.distributed.parallelizer import ModelParallelizer
from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
from nemo_automodel.components.optim.optimizer import build_optimizer
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_runtime import MeshError, OptionError, load_weights, meta_device
from fsdp_runtime.optim import Muon
from fsdp_runtime.sharded.gather import full_tensors
from fsdp_runtime.trainers import automodel
from harness.ranks import RankPool
from harness.trainers import token_rows, write_checkpoint

SIZES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp_size": 2}, {}),
    "fsdp": ({"dp_size": 2}, {}),
    "fsdp x tp": ({"dp_size": 2, "tp_size": 2}, {}),
    "fsdp x sp, recomputed": (
        {"dp_size": 2, "tp_size": 2},
        {"sequence_parallel": True, "activation_checkpointing": True},
    ),
    "hsdp": ({"dp_size": 4, "dp_replicate_size": 2}, {"reshard_after_forward": True, "enable_fsdp2_prefetch": True}),
    "cp": ({"cp_size": 2}, {}),
    "fsdp x cp": ({"dp_size": 2, "cp_size": 2}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def context_of(sizes: dict[str, int], **settings: Any) -> MeshContext:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **settings)
    moe = MoEParallelizerConfig() if sizes.get("ep_size", 1) > 1 else None
    return MeshContext.build(
        config,
        ParallelismSizes(**sizes),
        moe_parallel_config=moe,
        activation_checkpointing=config.activation_checkpointing,
    )


def sharded(folder: Path, context: MeshContext) -> nn.Module:
    """A model as recipes get it: built on the meta device, sharded, initialized, and then loaded."""
    with meta_device():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model = model_parallelizer.parallelize_model(model, context)
    Checkpointer.initialize_model_weights(model, torch.device("cpu"))
    load_weights(model, folder)
    if context.cp_size > 1 and context.ep_size == 1:
        context_parallel.attach_context_parallel_hooks(model)
    return model


def gradients(
    folder: Path, sizes: dict[str, int] | None, settings: dict[str, Any], *, padded: bool = False
) -> dict[str, Tensor]:
    """A backward as recipes run it; on a mesh, the gradients that its optimizer gets, in full."""
    names = ("input_ids", "labels", *["attention_mask"] * padded)
    rows = {name: torch.tensor([row[name] for row in token_rows(4)]) for name in names}
    if padded:  # on the left, where tokens would read it without the mask
        rows = {name: value.flip(1) for name, value in rows.items()}
    rows["labels"] = torch.nn.functional.pad(rows["labels"][:, 1:], (0, 1), value=-100)  # as Automodel's collaters do
    labelled, ranks, mesh, experts = int((rows["labels"] != -100).sum()), 1, None, None
    if sizes is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        context = context_of(sizes, **settings)
        mesh, experts = context.device_mesh, context.moe_mesh
        model = sharded(folder, context)
        dp, rank = context.dp_size, mesh["dp"].get_local_rank()
        ranks = dp * context.cp_size
        rows = {name: value.chunk(dp)[rank] for name, value in rows.items()}
    entered, batch = ContextParallelSharder(model, mesh, dict(rows), padding_token_id=0).shard(dict(rows))
    labels = batch.pop("labels")
    with entered():
        logits = model(**batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labelled
        (loss * ranks).backward()
    synchronize_tp_replica_gradients([model], mesh)
    scale_grads_and_clip_grad_norm(
        None,
        [model],
        device_mesh=mesh,
        moe_mesh=experts,
        ep_axis_name="ep" if experts is not None and "ep" in experts.mesh_dim_names else None,
        num_label_tokens=labelled,
        dp_group_size=ranks,
    )
    named = dict(model.named_parameters())
    found = full_tensors([own.grad for own in named.values()])
    return {
        name.replace("_checkpoint_wrapped_module.", ""): own.clone() for name, own in zip(named, found, strict=True)
    }


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    far = {name: ((found[name] - own).abs().max() / own.abs().max()).item() for name, own in expected.items()}
    return {name: error for name, error in far.items() if not error < 1e-4}


@pytest.mark.parametrize("kind", SIZES)
def test_every_gradient_is_that_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, folder: Path, kind: str
) -> None:
    sizes, settings = SIZES[kind]
    ranks = (
        four_ranks if sizes.get("dp_size", 1) * sizes.get("tp_size", 1) * sizes.get("cp_size", 1) == 4 else two_ranks
    )
    expected = gradients(folder, None, {})
    for found in ranks.run(gradients, folder, sizes, settings, timeout=300):
        assert errors(found, expected) == {}


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_size": 2, "ep_size": 2},
        {"dp_size": 4, "ep_size": 2},
        {"dp_size": 2, "tp_size": 2, "ep_size": 2},
        {"dp_size": 2, "cp_size": 2, "ep_size": 4},
    ],
    ids=str,
)
def test_experts_are_divided_and_their_gradients_are_those_of_one_process(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    write_checkpoint(tmp_path, architecture="Qwen3MoeForCausalLM")
    expected = gradients(tmp_path, None, {})
    ranks = two_ranks if sizes == {"dp_size": 2, "ep_size": 2} else four_ranks
    for found in ranks.run(gradients, tmp_path, sizes, {}, timeout=300):
        assert errors(found, expected) == {}


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_padding_and_windows_are_masked_on_cp_as_in_one_process(
    two_ranks: RankPool, tmp_path: Path, architecture: str
) -> None:
    write_checkpoint(tmp_path, architecture=architecture)
    expected = gradients(tmp_path, None, {}, padded=True)
    for found in two_ranks.run(gradients, tmp_path, {"cp_size": 2}, {}, padded=True, timeout=300):
        assert errors(found, expected) == {}


SHARDED_FRAMES = MultimodalVisionConfig(frame_sharding=CpVisionFrameShardingConfig(enabled=True))
REFUSED: dict[str, dict[str, Any]] = {
    "enable_compile": {"enable_compile": True},
    "patch_is_packed_sequence": {"patch_is_packed_sequence": True},
    "activation_checkpointing_scope": {"activation_checkpointing_scope": "vision"},
    "frame_sharding": {"multimodal": MultimodalDistributedConfig(vision=SHARDED_FRAMES)},
}


def stepped(folder: Path, sizes: dict[str, int] | None) -> dict[str, Tensor]:
    """The weights after two steps of the optimizer that a recipe builds from its target's name."""
    target, options = "fsdp_runtime.trainers.automodel.RecipeMuon", {"lr": 1e-2, "adamw_eps": 1e-3}
    rows = torch.tensor([row["input_ids"] for row in token_rows(4)])
    if sizes is None:
        mesh, share = None, rows
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        options["model"] = model
    else:
        context = context_of(sizes)
        mesh, model = context.device_mesh, sharded(folder, context)
        share = rows.chunk(context.dp_size)[mesh["dp"].get_local_rank()]
    (optimizer,) = build_optimizer(model, (target, {**options, "ns_dtype": "float32"}), device_mesh=mesh)
    assert isinstance(optimizer, Muon)
    for _ in range(2):
        logits = model(input_ids=share).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), share[:, 1:].flatten()).backward()
        synchronize_tp_replica_gradients([model], mesh)
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    return dict(zip(named, full_tensors(list(named.values())), strict=True))


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2}], ids=str)
def test_muon_of_a_recipe_takes_the_steps_of_one_process(
    two_ranks: RankPool, folder: Path, sizes: dict[str, int]
) -> None:
    expected = stepped(folder, None)
    for weights in two_ranks.run(stepped, folder, sizes):
        assert not {name for name, weight in expected.items() if not (weights[name] - weight).abs().max() < 1e-6}


def refusal(folder: Path, context: MeshContext, *, adapted: bool = False) -> str:
    """What is said of a model that nothing has sharded after."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapted:
        apply_lora_to_linear_modules(model, PeftConfig(target_modules=["*.q_proj"]))
    with pytest.raises((OptionError, MeshError)) as error:
        model_parallelizer.parallelize_model(model, context)
    assert not any(isinstance(own, torch.distributed.tensor.DTensor) for own in model.parameters())
    return str(error.value)


def refusals(folder: Path) -> list[str]:
    tp = context_of({"tp_size": 2})
    unknown = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    experts = MoEParallelizerConfig(wrap_outer_model=False)
    return [
        *(refusal(folder, context_of({"tp_size": 2}, **settings)) for settings in REFUSED.values()),
        refusal(folder, tp, adapted=True),
        refusal(folder, dataclasses.replace(tp, cp_ring_degree=2)),
        refusal(folder, dataclasses.replace(tp, moe_parallel_config=experts)),
        refusal(folder, MeshContext.from_meshes(unknown, strategy_config=FSDP2Config())),
    ]


def test_settings_that_are_not_covered_are_refused(two_ranks: RankPool, folder: Path) -> None:
    names = [*REFUSED, "q_proj computes its adapter", "cp_ring_degree", "wrap_outer_model", "the mesh has axes dp"]
    for found in two_ranks.run(refusals, folder, timeout=100):
        assert [name for name, text in zip(names, found, strict=True) if name not in text] == []


def sharded_on_two_axes(folder: Path) -> list[tuple[str, ...]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    context = MeshContext.from_meshes(mesh, strategy_config=FSDP2Config(mp_policy=MixedPrecisionPolicy()))
    model = model_parallelizer.parallelize_model(AutoModelForCausalLM.from_pretrained(folder), context)
    return list({own.device_mesh.mesh_dim_names for own in model.parameters()})


def test_a_mesh_may_lack_axes_of_size_one(two_ranks: RankPool, folder: Path) -> None:
    for found in two_ranks.run(sharded_on_two_axes, folder, timeout=100):
        assert found == [("dp_shard", "tp")]


@pytest.mark.parametrize(("own", "moe", "expected"), [(None, False, False), (None, True, True), (True, False, True)])
def test_blocks_of_mixtures_are_kept_gathered_as_automodel_keeps_them(
    own: bool | None, moe: bool, expected: bool
) -> None:
    context = MeshContext(moe_parallel_config=MoEParallelizerConfig(reshard_after_forward=moe))
    options = automodel._fsdp(FSDP2Config(reshard_after_forward=own), context, 1.0)
    assert options.reshard_after_forward is expected


def test_models_with_experts_may_have_ep(tmp_path: Path) -> None:
    for architecture, expected in (("Qwen3MoeForCausalLM", True), ("Qwen3ForCausalLM", False)):
        model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, architecture=architecture))
        assert ModelSupports(model, None).supports_ep is expected


#: The fields of ``FSDP2Config``, with what this package does about each.
FIELDS = {
    "sequence_parallel": "parallelize",
    "tp_plan": "parallelize(plan=...)",
    "patch_is_packed_sequence": "refused",
    "mp_policy": "FSDP2",
    "offload_policy": "FSDP2",
    "autocast_dtype": "of the recipe",
    "activation_checkpointing": "of the mesh context",
    "activation_checkpointing_scope": "refused but all",
    "defer_fsdp_grad_sync": "of the recipe",
    "reshard_after_forward": "FSDP2",
    "enable_async_tensor_parallel": "refused",
    "enable_compile": "refused",
    "enable_fsdp2_prefetch": "FSDP2",
    "fsdp2_backward_prefetch_depth": "FSDP2",
    "fsdp2_forward_prefetch_depth": "FSDP2",
    "multimodal": "FSDP2(frozen_params=...)",
}


def test_automodel_is_what_the_adapter_was_written_for() -> None:
    """Fails when a name or a signature that the adapter uses has changed."""
    assert model_parallelizer.get_model_parallelizer(torch.nn.Linear(1, 1)) is not automodel.PARALLELIZER
    assert PreTrainedModel.parallelizer is automodel.PARALLELIZER
    assert {each.name for each in dataclasses.fields(FSDP2Config)} == set(FIELDS)
    assert list(inspect.signature(ModelParallelizer.parallelize).parameters) == ["self", "model", "mesh_context"]
    read = {
        "device_mesh",
        "moe_mesh",
        "strategy_config",
        "moe_parallel_config",
        "activation_checkpointing",
        "reapply_trainability",
    }
    assert read <= {each.name for each in dataclasses.fields(MeshContext)}
    assert {"ignore_router_for_ac", "reshard_after_forward", "lm_head_precision", "wrap_outer_model", "mp_policy"} == {
        each.name for each in dataclasses.fields(MoEParallelizerConfig)
    }
    arguments = ["cp_mesh", "tp_mesh", "batch", "loss_mask", "padding_token_id"]
    assert list(inspect.signature(shard_batch_identity).parameters) == arguments
