"""All names that are used from verl; its interface "is subject to change before release" (its ``BaseEngine``).

Other files of this folder import verl's names from here only.  ``SIGNATURES`` has the parameters of called functions; a
test compares them with the installed verl, and the engine's methods with the overridden methods of ``BaseEngine``.
"""

from __future__ import annotations

import re

from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import extract_multi_modal_inputs, get_hf_auto_model_class
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import ActorConfig, CriticConfig, FSDPEngineConfig, HFModelConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.spec import BlockPlacement, ShardSpec, translate_flat_indices
from verl.workers.engine.utils import (
    enable_full_determinism,
    hf_delta_export,
    postprocess_batch_func,
    prepare_micro_batches,
    prime_delta_snapshots,
)

#: Called functions of verl 0.9.1, by module.
_USED = {
    "verl.workers.engine.base": """
        BaseEngineCtx.__init__(self, engine, mode, **kwargs)
        EngineRegistry.register(model_type, backend, device, vendor)
    """,
    "verl.workers.engine.utils": """
        enable_full_determinism(seed)
        hf_delta_export(gen, snaps, entry_fn)
        postprocess_batch_func(output_lst, indices, data)
        prepare_micro_batches(data, dp_group, num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch,
            use_dynamic_bsz_balance)
        prime_delta_snapshots(gen, snaps, pin)
    """,
    "verl.workers.engine.spec": """
        ShardSpec.__init__(self, full_shape, mesh, placements, place, gather_group, contributes, to_hf_chunk, hf_slots)
        BlockPlacement.__init__(self, local_shape, global_offset, full_shape)
        translate_flat_indices(lidx, place)
    """,
    "verl.utils.tensordict_utils": """
        get_non_tensor_data(data, key, default)
        assign_non_tensor(tensor_dict, **kwargs)
    """,
    "verl.utils.torch_functional": """
        get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch)
        get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps, min_lr_ratio, num_cycles,
            last_epoch, init_lr_ratio, zero_indexed_step)
    """,
    "verl.utils.fsdp_utils": "replace_lora_wrapper(k, peft_config)",
    "verl.utils.model": """
        extract_multi_modal_inputs(batch_data, indices)
        get_hf_auto_model_class(hf_config)
    """,
    "verl.utils.py_functional": "convert_to_regular_types(obj)",
    "verl.workers.config.optimizer": "build_optimizer(parameters, config)",
}
#: The parameters of each function, by path.
SIGNATURES = {
    f"{module}.{name}": tuple(re.split(r",\s+", parameters))
    for module, text in _USED.items()
    for name, parameters in re.findall(r"([\w.]+)\(([^)]*)\)", text)
}
