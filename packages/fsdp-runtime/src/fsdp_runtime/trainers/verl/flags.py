"""The effect of each verl flag on this engine, as data for the guide's table, refusals and ``verl-check``.

A flag is in one of three states.  *same*: verl's trainer reads it, or the engine does the same as verl's own.  *here*:
the engine keeps the meaning by another method, named in the text.  *refused*: an error at start names the fix.

Fields are checked for their declared types too: Python takes YAML's text ``"False"`` as true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fsdp_runtime.errors import OptionError

State = Literal["same", "here", "refused"]


class Flag(NamedTuple):
    """One flag: its state and a note; for a refused flag, the entry that sets it and the flag that it needs."""

    state: State
    text: str = ""
    entry: str = ""
    only_with: str = ""

    def value_in(self, config: Any, name: str) -> Any:
        """Return the value that a config sets, false for no value."""
        value = getattr(config, name, None)
        if self.only_with and not getattr(config, self.only_with, None):
            return None
        if self.entry:
            return (value or {}).get(self.entry, None)
        return value if not isinstance(value, Mapping) or any(value.values()) else None

    def path(self, name: str) -> str:
        return f"{name}.{self.entry}" if self.entry else name


_FUSED = Flag("here", "log-probs and entropy never need logits, whatever it says")
_ULYSSES = {"ulysses_sequence_parallel_size": Flag("here", "`cp` with `context_parallel=ulysses`")}
_TILES = {
    "entropy_from_logits_with_chunking": Flag("here", "always in tiles"),
    "entropy_from_logits_chunk_size": Flag("here", "the tiles' size follows from the device"),
    "entropy_checkpointing": Flag("here", "backward always computes the tiles again"),
}
#: Values of refused flags that ask for nothing.
_UNSET = ("torch", "disabled")
_OWN_CONFIG = Flag("here", "its fields are handed to `fsdp_runtime`, with the fields of `MeshSpec` and of the steps")


def _same(names: str) -> dict[str, Flag]:
    return dict.fromkeys(names.split(), Flag("same"))


#: By the name of verl's dataclass; inherited fields are in the entry of the declaring class.
FLAGS: dict[str, dict[str, Flag]] = {
    "EngineConfig": {
        **_same(
            "_target_ strategy forward_only use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu "
            "infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu seed full_determinism"
        ),
        "param_offload": Flag("same", "parameters and gradients are on the host between phases"),
        "optimizer_offload": Flag("same", "the optimizer's state is on the host between phases"),
        "grad_offload": Flag("refused", "Megatron's; gradients move with the parameters by `param_offload`"),
        "dtype": Flag("same", "the dtype of computation, unless `param_dtype` is set"),
        "use_fused_kernels": _FUSED,
        "use_remove_padding": Flag("same", "documents of packed rows are isolated, recurrent layers included"),
        "router_replay": Flag("same", "R2 and R3, on any mixture"),
    },
    "FSDPEngineConfig": {
        **_same("reshard_after_forward use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket"),
        "wrap_policy": Flag("refused", "FSDP2 wraps each block"),
        "offload_policy": Flag("same", "FSDP2's `CPUOffloadPolicy`"),
        "fsdp_size": Flag("here", "`dp_shard`, with the other ranks in `dp_replicate`"),
        "forward_prefetch": Flag("refused", "FSDP1's; FSDP2 has `prefetch_forward=1`"),
        "model_dtype": Flag("same", "float32 of trained parameters"),
        "use_orig_params": Flag("same", "FSDP2 has no other way"),
        "mixed_precision": Flag("same", "`param_dtype` and `reduce_dtype` are fields too"),
        **_ULYSSES,
        **_TILES,
        "use_torch_compile": Flag("refused", "compiles verl's entropy function; `compile=True` compiles the blocks"),
        "qat": Flag("refused", "needs verl's own engine", "enable"),
        "turbo_config": Flag("refused", "needs verl's own engine"),
    },
    "HFModelConfig": {
        **_same(
            "_target_ path local_path hf_config_path local_hf_config_path tokenizer_path local_tokenizer_path "
            "model_type load_tokenizer hf_config generation_config tokenizer processor use_shm trust_remote_code "
            "custom_chat_template external_lib override_config use_remove_padding architectures lora_rank lora_alpha "
            "target_modules target_parameters exclude_modules lora_adapter_path"
        ),
        "enable_gradient_checkpointing": Flag("here", "`activation_checkpointing=block`, unless that is set"),
        "enable_activation_offload": Flag(
            "refused", "written for verl's own engine; `enable_gradient_checkpointing=True`"
        ),
        "lora": Flag("refused", "Megatron's; set `model.lora_rank`, and `lora.merge` stays", "rank"),
        "use_liger": Flag("refused", "replaces modules; losses need no logits here"),
        "use_fused_kernels": _FUSED,
        "fused_kernel_options": Flag(
            "refused",
            "other than `torch`: losses come from hidden states in tiles",
            "impl_backend",
            "use_fused_kernels",
        ),
        "tiled_mlp": Flag("refused", "replaces MLPs; `activation_checkpointing=mlp`", "enabled"),
        "mtp": Flag("refused", "Megatron's; layers of MTP are not trained", "enable"),
    },
    "ActorConfig": {
        **_same(
            "_target_ strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
            "ppo_infer_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
            "ppo_infer_max_token_len_per_gpu clip_ratio clip_ratio_low clip_ratio_high policy_loss clip_ratio_c "
            "loss_agg_mode loss_scale_factor entropy_coeff tau_pos tau_neg calculate_entropy use_kl_loss kl_loss_coef "
            "kl_loss_type ppo_epochs shuffle data_loader_seed checkpoint optim profiler engine rollout_n model_config "
            "global_batch_info freeze_vision_tower"
        ),
        "calculate_sum_pi_squared": Flag("same", "without logits"),
        "use_prefix_grouper": Flag("refused", "replaces attention in verl's own engines"),
        "use_torch_compile": Flag("here", "verl's own engine alone reads it; `compile` compiles the blocks"),
        "use_fused_kernels": _FUSED,
        "qat": Flag("refused", "needs verl's own engine", "enable"),
        "router_replay": Flag(
            "refused", "the actor's in verl 0.10; here the engine's, `fsdp_runtime.router_replay.mode`", "mode"
        ),
    },
    "FSDPActorConfig": {
        **_same("grad_clip use_remove_padding use_rollout_log_probs pad_to_length"),
        **_ULYSSES,
        **_TILES,
        "fsdp_config": _OWN_CONFIG,
    },
    "CriticConfig": _same(
        "_target_ strategy ppo_micro_batch_size_per_gpu enable rollout_n ppo_mini_batch_size use_dynamic_bsz "
        "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu "
        "ppo_infer_max_token_len_per_gpu ppo_epochs data_loader_seed shuffle cliprange_value loss_agg_mode "
        "loss_scale_factor ppo_micro_batch_size engine optim model checkpoint profiler"
    ),
    "FSDPCriticConfig": {
        **_same("forward_micro_batch_size forward_micro_batch_size_per_gpu grad_clip"),
        **_ULYSSES,
        "fsdp": _OWN_CONFIG,
    },
    "CheckpointConfig": {
        **_same("_target_ save_contents load_contents"),
        "async_save": Flag("refused", "states are written before training goes on"),
        "strict": Flag("here", "exports are always complete"),
        "save_lora_only": Flag(
            "refused", "`lora_adapter/` is written with every checkpoint; `save_contents=[]` writes it alone"
        ),
    },
    "EngineRouterReplayConfig": {
        **_same("_target_ mode"),
        "record_file": Flag("refused", "routes travel with the batch; no engine of verl reads it"),
        "replay_file": Flag("refused", "routes travel with the batch; no engine of verl reads it"),
    },
    "FSDPOptimizerConfig": _same(
        "_target_ lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas clip_grad "
        "grad_clip optimizer optimizer_impl min_lr_ratio warmup_style lr_scheduler_type num_cycles "
        "override_optimizer_config zero_indexed_step"
    ),
}


def refuse(where: str, kind: str, config: Any) -> None:
    """Refuse a config that sets flags without a counterpart, or flags that a newer verl added."""
    # ``where`` begins the names of the error; ``kind`` is a class of ``FLAGS``.
    for name, flag in FLAGS[kind].items():
        value = flag.value_in(config, name) if flag.state == "refused" else None
        if value and value not in _UNSET:
            text = flag.text.replace("`", "")
            raise OptionError(f"{where}{flag.path(name)}={value!r} is refused by fsdp_runtime: {text}; leave it out")
    for each in _unknown(kind):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if (value := getattr(config, each.name, default)) != default:
            raise OptionError(
                f"{where}{each.name}={value!r} is a flag of this verl that fsdp_runtime does not know, so that nothing "
                f"would read it: leave it at {default!r}"
            )


def unknown_fields() -> list[str]:
    """Return the fields of the installed verl's configs that :data:`FLAGS` does not have, as ``Class.field``."""
    return [f"{kind}.{each.name}" for kind in FLAGS for each in _unknown(kind)]


def _unknown(kind: str) -> list[Any]:
    from verl.trainer import config as of_trainer
    from verl.workers import config as of_workers

    config_class = getattr(of_workers, kind, None) or getattr(of_trainer, kind)
    known = {name for base in config_class.__mro__ for name in FLAGS.get(base.__name__, {})}
    return [each for each in fields(config_class) if each.name not in known]


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", dict: "a mapping", tuple: "numbers"}


def require_types(
    where: str, config: Any, *, kind: type | None = None, names: Collection[str] = (), or_none: str = ""
) -> None:
    """Check flags, numbers and mappings of a config; fields of text are checked where they are used."""
    # ``kind`` is the dataclass that declares the fields, by default the config's; ``names``, by default all, are the
    # checked fields; ``or_none`` and fields with the default ``None`` may be ``None``.
    hints = get_type_hints(kind := kind or type(config))
    for each in fields(kind):
        value, hint = getattr(config, each.name, None), hints[each.name]
        unset = value is None and (each.default is None or each.name == or_none)
        if each.name in (names or hints) and not unset and not _fits(value, hint):
            declared = next(get_origin(part) or part for part in (*_parts(hint), hint) if part is not NoneType)
            wanted = _WORDS.get(declared, f"an instance of {getattr(declared, '__name__', declared)}")
            quotes = ", without quotes" if isinstance(value, str) and declared in (bool, int, float) else ""
            raise OptionError(f"{where}{each.name}={value!r}: give {wanted}{quotes}")


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else ()


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Any, str):
        return True
    if parts := _parts(hint):
        return any(_fits(value, each) for each in parts)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if origin is tuple:
        items = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(inner)
        return items and all(map(_fits, value, inner))
    kind = origin or hint
    return isinstance(value, {dict: Mapping, list: Sequence}.get(kind, kind))
