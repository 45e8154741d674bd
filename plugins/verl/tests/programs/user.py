"""A user's script: verl and nothing else. Score, then train by PPO and GRPO, with verl's own workers and losses.

Run as: user.py MODEL FORMAT DTYPE, as one rank of TENSOR * CONTEXT many. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

import numpy as np
import torch
import verl  # noqa: F401 - a user's first line
from recorded import LENGTHS, recorded_batch
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_grpo_outcome_advantage
from verl.utils import device
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


def make_worker(model, sequence_format, dtype="float32", model_type="language_model"):
    """Make verl's worker as its trainer does; float32 is set past its configuration, which knows two dtypes."""
    tensor, context = int(os.environ.get("TENSOR", "1")), int(os.environ.get("CONTEXT", "1"))
    engine = McoreEngineConfig(
        use_mbridge=True, vanilla_mbridge=True, use_dynamic_bsz=True, max_token_len_per_gpu=48,
        infer_max_token_len_per_gpu=48, use_remove_padding=sequence_format == "thd",
        tensor_model_parallel_size=tensor, context_parallel_size=context, sequence_parallel=tensor > 1,
        override_transformer_config={"attention_backend": "auto"},
    )  # fmt: skip
    object.__setattr__(engine, "dtype", dtype)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=HFModelConfig(
                path=model,
                use_remove_padding=sequence_format == "thd",
                override_config={"attn_implementation": "eager"},
            ),
            engine_config=engine,
            optimizer_config=McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10, weight_decay=0.0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def without_padding(columns, **facts):
    data = left_right_2_no_padding(
        DataProto.from_single_dict(columns, meta_info={"temperature": 0.8, **facts}).to_tensordict()
    )
    tu.assign_non_tensor(
        data, global_token_num=columns["attention_mask"].sum(1).tolist(), global_batch_size=len(LENGTHS)
    )
    return data


def told(found):
    """Give all ranks what the first one found: it alone has a worker's answer, which verl's controller hands on."""
    box = [found]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def score(worker, columns, output):
    """Compute log-probs or values of the responses, 0 behind their ends."""
    data = without_padding(columns, compute_loss=False, calculate_entropy=True)
    answer = worker.infer_batch(data)
    found = None if answer is None else no_padding_2_padding(tu.get(answer, output), data)
    return told(found) * columns["response_mask"]


def update(worker, loss, config, columns):
    """Take a step; give what verl measures of it."""
    settings = config(strategy="megatron", ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=True)
    worker.set_loss_fn(partial(loss, config=settings))
    answer = worker.train_batch(without_padding(columns))
    measured = {} if answer is None else tu.get(answer, "metrics")
    return told({name: float(np.sum(measured[name])) for name in ("loss", "grad_norm") if name in measured})


def train(worker, critic, columns, algorithm, old):
    """Take one step of an algorithm; give what verl measures of it."""
    rewards = torch.zeros_like(columns["response_mask"], dtype=torch.float32)
    for row, (_, response) in enumerate(LENGTHS):
        rewards[row, response - 1] = row % 3
    mask, facts = columns["response_mask"].float(), {}
    if algorithm == "ppo":
        values = score(critic, columns, "values")
        advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.95)
        measured = update(critic, value_loss, CriticConfig, {**columns, "values": values, "returns": returns})
        facts = {"critic_grad_norm": measured["grad_norm"]}
    else:
        groups = np.array([str(row // 4) for row in range(len(LENGTHS))])
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, groups)
    actor = partial(ActorConfig, rollout_n=1)
    return {**update(worker, ppo_loss, actor, {**columns, "old_log_probs": old, "advantages": advantages}), **facts}


def main(model, sequence_format, dtype):
    worker = make_worker(model, sequence_format, dtype)
    critic = make_worker(model, sequence_format, dtype, "value_model")
    columns = recorded_batch()
    facts = {
        "engine": type(worker.engine).__name__,
        "critic": type(critic.engine).__name__,
        "is_npu_available": device.is_npu_available,
    }
    old = score(worker, columns, "log_probs")
    facts["log_probs"] = old.tolist()
    facts["ppo"] = train(worker, critic, columns, "ppo", old)
    facts["grpo"] = train(worker, critic, columns, "grpo", old)
    facts["after"] = score(worker, columns, "log_probs").tolist()
    return facts, worker


if __name__ == "__main__":
    found, _ = main(*sys.argv[1:])
    print(json.dumps(found), flush=True)
    os._exit(0)  # Megatron keeps process groups in globals, whose threads would end the interpreter with an error
