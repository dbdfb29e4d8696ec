# Sourced by the scripts beside it: verl on CPU processes, a folder with the toy task, one engine.
#   WORK    where model, data and logs go (default: a folder in /tmp)
#   ENGINE  fsdp_runtime (default), or fsdp2 for verl's own engine
#   STEPS   updates
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export WORK=${WORK:-${TMPDIR:-/tmp}/verl-toy} ENGINE=${ENGINE:-fsdp_runtime}
export PYTHONPATH=$here:$here/../../../integration_tests${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=with_verl.cpu_platform,hf_rollout
# Ray lets its workers give way to all other programs and waits a minute for one: too short where the machine is busy.
export RAY_worker_niceness=0 RAY_worker_register_timeout_seconds=600 RAY_USAGE_STATS_ENABLED=0
[ "$ENGINE" = fsdp_runtime ] || export VERL_ENGINE_DEVICE=cuda # verl registers its own for cuda and npu alone
[ -e "$WORK/sft.parquet" ] || python "$here/toy_task.py" "$WORK" >/dev/null

logged() { # NAME: where verl's file logger writes, a JSON object a step
    export VERL_FILE_LOGGER_PATH=$WORK/$1-$ENGINE.jsonl
    name=(trainer.project_name=toy trainer.experiment_name="$1-$ENGINE" trainer.default_local_dir="$WORK/$1-$ENGINE")
}

# verl's trainers on two CPU processes, without validation and checkpoints
trainer=(trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=2 'trainer.logger=[console,file]'
    trainer.resume_mode=disable trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_epochs=100)

# Reinforcement learning on the toy task.  Ray is told of as many "GPUs" as there are ranks, and of as many CPUs as verl
# reserves; it starts a process for each at once.  The rollout of hf_rollout.py is one replica.
rl=(ray_kwargs.ray_init.num_cpus=9 +ray_kwargs.ray_init.num_gpus=2 +ray_kwargs.ray_init.include_dashboard=False
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 reward.num_workers=1
    actor_rollout_ref.rollout.agent.num_workers=1 trainer.val_before_train=False
    data.train_files="$WORK/rl.parquet" data.val_files="$WORK/rl-held-out.parquet" data.dataloader_num_workers=0
    data.train_batch_size=10 data.max_prompt_length=8 data.max_response_length=8 data.shuffle=False
    reward.custom_reward_function.path="$here/toy_task.py"
    actor_rollout_ref.model.path="$WORK/policy" +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=10
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512
    actor_rollout_ref.rollout.name=hf_cpu actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512)

# The engine of the actor, and of the reference if there is one: the lines that change
if [ "$ENGINE" = fsdp_runtime ]; then
    actor=(model_engine=fsdp_runtime actor_rollout_ref.actor.fsdp_runtime.tp=2
        actor_rollout_ref.actor.fsdp_runtime.param_dtype=fp32 actor_rollout_ref.actor.fsdp_runtime.sync_dtype=fp32)
else
    actor=(actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
        +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
        +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32)
fi
