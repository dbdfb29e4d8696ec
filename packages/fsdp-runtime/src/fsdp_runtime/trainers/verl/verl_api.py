"""Everything that is used of verl, whose interface "is subject to change before release" (its ``BaseEngine``).

Other files of this folder import verl's names from here only.  ``SIGNATURES`` has the parameters of what is called or
overridden; a test compares them with the installed verl.
"""

from __future__ import annotations

from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import extract_multi_modal_inputs, get_hf_auto_model_class
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import ActorConfig, CriticConfig, EngineConfig, HFModelConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.spec import BlockPlacement, ShardSpec, translate_flat_indices
from verl.workers.engine.utils import enable_full_determinism, postprocess_batch_func, prepare_micro_batches

__all__ = [
    "SIGNATURES",
    "ActorConfig",
    "BaseEngine",
    "BaseEngineCtx",
    "BlockPlacement",
    "CriticConfig",
    "DatasetPadMode",
    "EngineConfig",
    "EngineRegistry",
    "HFModelConfig",
    "PrecisionType",
    "ShardSpec",
    "build_optimizer",
    "convert_to_regular_types",
    "enable_full_determinism",
    "extract_multi_modal_inputs",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_device_id",
    "get_device_name",
    "get_hf_auto_model_class",
    "postprocess_batch_func",
    "prepare_micro_batches",
    "replace_lora_wrapper",
    "tensordict_utils",
    "translate_flat_indices",
]

_BASE = "verl.workers.engine.base"
_UTILS = "verl.workers.engine.utils"
_SPEC = "verl.workers.engine.spec"
_TENSORDICT = "verl.utils.tensordict_utils"
_SCHEDULES = "verl.utils.torch_functional"

#: The parameters of verl 0.9.1, by path.
SIGNATURES = {
    f"{_BASE}.BaseEngine.initialize": ("self",),
    f"{_BASE}.BaseEngine.train_mode": ("self", "**kwargs"),
    f"{_BASE}.BaseEngine.eval_mode": ("self", "**kwargs"),
    f"{_BASE}.BaseEngine.optimizer_zero_grad": ("self",),
    f"{_BASE}.BaseEngine.optimizer_step": ("self",),
    f"{_BASE}.BaseEngine.lr_scheduler_step": ("self",),
    f"{_BASE}.BaseEngine.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    f"{_BASE}.BaseEngine.train_batch": ("self", "data", "loss_function"),
    f"{_BASE}.BaseEngine.infer_batch": ("self", "data", "loss_function"),
    f"{_BASE}.BaseEngine.get_per_tensor_param": ("self",),
    f"{_BASE}.BaseEngine.get_per_tensor_param_shard": ("self", "**kwargs"),
    f"{_BASE}.BaseEngine.get_per_tensor_param_delta_shard": ("self", "**kwargs"),
    f"{_BASE}.BaseEngine.prime_delta_snapshots": ("self",),
    f"{_BASE}.BaseEngine.get_data_parallel_size": ("self",),
    f"{_BASE}.BaseEngine.get_data_parallel_rank": ("self",),
    f"{_BASE}.BaseEngine.get_data_parallel_group": ("self",),
    f"{_BASE}.BaseEngine.to": ("self", "device", "model", "optimizer", "grad"),
    f"{_BASE}.BaseEngine.save_checkpoint": (
        "self",
        "local_path",
        "hdfs_path",
        "global_step",
        "max_ckpt_to_keep",
        "**kwargs",
    ),
    f"{_BASE}.BaseEngine.load_checkpoint": ("self", "local_path", "hdfs_path", "del_local_after_load", "**kwargs"),
    f"{_BASE}.BaseEngine.is_mp_src_rank_with_outputs": ("self",),
    f"{_BASE}.BaseEngine.disable_adapter": ("self",),
    f"{_BASE}.BaseEngineCtx.__init__": ("self", "engine", "mode", "**kwargs"),
    f"{_BASE}.EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
    f"{_UTILS}.enable_full_determinism": ("seed",),
    f"{_UTILS}.postprocess_batch_func": ("output_lst", "indices", "data"),
    f"{_UTILS}.prepare_micro_batches": (
        "data",
        "dp_group",
        "num_batches_divided_by",
        "same_micro_num_in_dp",
        "min_num_micro_batch",
        "use_dynamic_bsz_balance",
    ),
    f"{_SPEC}.ShardSpec.__init__": (
        "self",
        "full_shape",
        "mesh",
        "placements",
        "place",
        "gather_group",
        "contributes",
        "to_hf_chunk",
        "hf_slots",
    ),
    f"{_SPEC}.BlockPlacement.__init__": ("self", "local_shape", "global_offset", "full_shape"),
    f"{_SPEC}.translate_flat_indices": ("lidx", "place"),
    f"{_TENSORDICT}.get_non_tensor_data": ("data", "key", "default"),
    f"{_TENSORDICT}.assign_non_tensor": ("tensor_dict", "**kwargs"),
    f"{_SCHEDULES}.get_constant_schedule_with_warmup": ("optimizer", "num_warmup_steps", "last_epoch"),
    f"{_SCHEDULES}.get_cosine_schedule_with_warmup": (
        "optimizer",
        "num_warmup_steps",
        "num_training_steps",
        "min_lr_ratio",
        "num_cycles",
        "last_epoch",
        "init_lr_ratio",
        "zero_indexed_step",
    ),
    "verl.utils.fsdp_utils.replace_lora_wrapper": ("k", "peft_config"),
    "verl.utils.model.extract_multi_modal_inputs": ("batch_data", "indices"),
    "verl.utils.model.get_hf_auto_model_class": ("hf_config",),
    "verl.utils.py_functional.convert_to_regular_types": ("obj",),
    "verl.workers.config.optimizer.build_optimizer": ("parameters", "config"),
}
