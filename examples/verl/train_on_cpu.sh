#!/usr/bin/env bash
# verl's own GRPO on a processor: main_ppo, its Ray workers and its default trainer, unmodified, with anytron-verl installed.
#
#   examples/verl/train_on_cpu.sh [OVERRIDES OF VERL'S]
#
# A Qwen3 with random weights learns to sort two digits. Ends with an error if the reward is below 0.8. What it makes is
# in runs/verl, or in $DIRECTORY. Needs what constraints/verl.txt lists (plugins/verl/README.md). Another platform than
# the processor is that of ANYTRON_PLATFORM.
#
# Expected: reward 0.95 after 30 steps.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${DIRECTORY:=runs/verl}"
directory=$(cd "$DIRECTORY" && pwd)
digits=2

# A thread for each process: there are about ten, and Ray's workers inherit these variables.
export ANYTRON_PLATFORM="${ANYTRON_PLATFORM:-cpu}" OMP_NUM_THREADS=1 TQ_NUM_THREADS=1
export TORCHDYNAMO_DISABLE=1  # nothing is compiled
# Ray lowers its workers' priority by 15: beside anything else on the machine they would hardly get on.
export RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0
# A cluster of its own, whatever else Ray does on this machine. Sockets lie in its directory: TMPDIR must be short.
RAY_TMPDIR=$(mktemp -d)
export RAY_TMPDIR
trap 'rm -rf "$RAY_TMPDIR"' EXIT
export VERL_FILE_LOGGER_PATH="$directory/metrics.jsonl" ANYTRON_VERL_REPORT="$directory"

python "$here/prepare.py" "$directory" "$digits"
python -m verl.trainer.main_ppo model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_files="$directory/train.parquet" \
    data.val_files="$directory/validation.parquet" \
    data.max_prompt_length=$((digits + 1)) \
    data.max_response_length="$digits" \
    data.train_batch_size=32 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$directory/model" \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.optim.lr_decay_style=cosine \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_epochs=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.megatron.vanilla_mbridge=True \
    actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=auto \
    actor_rollout_ref.rollout.name=transformers \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    reward.num_workers=1 \
    reward.custom_reward_function.path="$here/reward.py" \
    trainer.n_gpus_per_node=2 \
    trainer.total_training_steps=30 \
    trainer.test_freq=30 \
    trainer.val_before_train=False \
    trainer.resume_mode=disable \
    trainer.logger='["console","file"]' \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    +ray_kwargs.ray_init.address=local \
    ray_kwargs.ray_init.num_cpus=16 \
    +ray_kwargs.ray_init.include_dashboard=False \
    +ray_kwargs.ray_init.object_store_memory=500000000 \
    hydra.run.dir="$directory" \
    "$@"
python "$here/last_reward.py" "$VERL_FILE_LOGGER_PATH" 0.8
