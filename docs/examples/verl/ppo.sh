#!/usr/bin/env bash
# PPO with a critic: bash docs/examples/verl/ppo.sh [more settings of verl].  verl's own value head needs flash attention.
set -eu
source "$(dirname "$0")/cpu.sh"
logged ppo
exec python -m verl.trainer.main_ppo "${actor[@]}" "${trainer[@]}" "${name[@]}" "${rl[@]}" \
    algorithm.adv_estimator=gae critic.fsdp_runtime.tp=2 critic.fsdp_runtime.param_dtype=fp32 \
    critic.model.path="$WORK/critic" critic.model.tokenizer_path="$WORK/critic" critic.optim.lr=1e-3 \
    critic.model.use_remove_padding=True critic.model.enable_gradient_checkpointing=False \
    +critic.model.override_config.attn_implementation=sdpa critic.ppo_max_token_len_per_gpu=512 \
    actor_rollout_ref.rollout.n=12 trainer.total_training_steps="${STEPS:-24}" "$@"
