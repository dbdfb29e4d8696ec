#!/usr/bin/env bash
# SFT with verl on two CPU processes: bash docs/examples/verl/sft.sh [more settings of verl]
set -eu
source "$(dirname "$0")/cpu.sh"
logged sft
if [ "$ENGINE" = fsdp_runtime ]; then # the changed line
    engine=(engine=fsdp_runtime engine.tp=2 engine.param_dtype=fp32)
else
    engine=(engine.strategy=fsdp2 engine.use_torch_compile=False
        +engine.mixed_precision.param_dtype=fp32 +engine.mixed_precision.reduce_dtype=fp32)
fi
exec torchrun --standalone --nproc-per-node=2 -m verl.trainer.sft_trainer "${engine[@]}" "${trainer[@]}" "${name[@]}" \
    data.train_files="$WORK/sft.parquet" data.val_files="$WORK/sft-held-out.parquet" data.num_workers=0 \
    data.train_batch_size=16 data.max_length=64 data.max_token_len_per_gpu=256 data.ignore_input_ids_mismatch=True \
    model.path="$WORK/policy" +model.override_config.attn_implementation=sdpa \
    model.use_remove_padding=True model.enable_gradient_checkpointing=False optim.lr=3e-3 \
    trainer.total_training_steps="${STEPS:-16}" "$@"
