#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
directory=${DIRECTORY:-runs/verl}
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
export ANYTRON_PLATFORM=cpu OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 RAY_USAGE_STATS_ENABLED=0
export VERL_FILE_LOGGER_PATH="$directory/metrics.jsonl"

python "$here/prepare.py" "$directory"
python -m verl.trainer.main_ppo model_engine=megatron \
    hydra.run.dir="$directory" \
    algorithm.adv_estimator=grpo \
    data.train_files="$directory/train.parquet" \
    data.val_files="$directory/validation.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=5 \
    data.max_response_length=4 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$directory/model" \
    actor_rollout_ref.actor.optim.lr=5e-4 \
    actor_rollout_ref.actor.entropy_coeff=0.01 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.megatron.vanilla_mbridge=True \
    actor_rollout_ref.actor.megatron.sequence_parallel=False \
    actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=auto \
    actor_rollout_ref.rollout.name=transformers \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    reward.num_workers=1 \
    reward.custom_reward_function.path="$here/reward.py" \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    trainer.logger='["console","file"]' \
    trainer.n_gpus_per_node=1 \
    trainer.total_training_steps=60 \
    trainer.val_before_train=False \
    trainer.resume_mode=disable \
    ray_kwargs.ray_init.num_cpus=16 \
    +ray_kwargs.ray_init.include_dashboard=False \
    +ray_kwargs.ray_init.object_store_memory=500000000 \
    "$@"
