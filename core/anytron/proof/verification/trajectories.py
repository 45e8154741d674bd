"""Make the data of the checks: the run's own prompts, and responses that its rollout engine samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.advantages import broadcast_to_tokens
from anytron.base.seeds import derive_seed
from anytron.run.rollout.conversations import SingleTurns
from anytron.run.trainer.experience import assemble, make_samples
from anytron.workers.engines.rollout_engine import PromptInputs

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.sequences.batch import RaggedBatch
    from anytron.task.rewards.sample import Sample

PROMPTS = 4
SAMPLES = 2
MAX_NEW_TOKENS = 32
"""Every kind of position occurs in so many tokens, and they take only seconds."""


@dataclass(frozen=True)
class Trajectories:
    """Sampled responses.

    Attributes:
        samples: The responses as rewards would see them.
        batch: The same for training; advantages alternate in sign, so that gradients are far from zero.
        sequences: Prompt and response of each sample together, with its images.
    """

    samples: list[Sample]
    batch: RaggedBatch
    sequences: list[PromptInputs]


def sample_trajectories(config: RunConfig, prepared: PreparedRun, rollout: RolloutPool) -> Trajectories:
    """Draw prompts and sample responses with the current weights of the rollout engine."""
    replicas = config.parallel.data_parallel_size
    # Every data-parallel replica gets its own sequences in every mini-batch.
    prompts = prepared.draw(max(PROMPTS, -(-replicas * config.algorithm.mini_batches // SAMPLES)))
    sampling = replace(
        prepared.sampling,
        max_new_tokens=min(MAX_NEW_TOKENS, prepared.sampling.max_new_tokens),
        min_new_tokens=min(MAX_NEW_TOKENS, prepared.sampling.min_new_tokens),
    )
    turns = SingleTurns(rollout, sampling)
    responses = turns.finish(turns.begin(prompts, SAMPLES, derive_seed(config.trainer.seed, "verify", 1)))
    samples = make_samples(prompts, responses, prepared.tokenizer)
    batch = assemble(samples, config.rollout.temperature, torch.arange(len(samples)) // SAMPLES)
    signs = torch.tensor([1.0 if index % 2 else -1.0 for index in range(len(samples))])
    advantages = broadcast_to_tokens(signs, batch.lengths, batch.response_mask)
    sequences = [
        PromptInputs(sample.prompt_tokens + sample.response_tokens, prompts[index // SAMPLES].patches)
        for index, sample in enumerate(samples)
    ]
    return Trajectories(samples, replace(batch, advantages=advantages), sequences)
