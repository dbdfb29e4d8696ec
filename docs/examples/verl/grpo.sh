#!/usr/bin/env bash
# GRPO with verl on two CPU processes: bash docs/examples/verl/grpo.sh [more settings of verl]
set -eu
source "$(dirname "$0")/cpu.sh"
logged grpo
exec python -m verl.trainer.main_ppo "${actor[@]}" "${trainer[@]}" "${name[@]}" "${rl[@]}" \
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=12 trainer.total_training_steps="${STEPS:-32}" "$@"
