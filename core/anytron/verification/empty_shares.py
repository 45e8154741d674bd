"""Micro-batches in which some rank, stage, replica or expert has nothing to do, and what an engine makes of them.

Lengths are below the number of context-parallel ranks and above; sequences of one token have nothing to predict, let
alone several tokens ahead, and leave most experts without any token. Where there are fewer sequences than replicas,
some replicas run fillers only; images are in one sequence, so on one replica.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.batch import RaggedBatch
from anytron.verification.gradients import computed_gradients
from anytron.verification.hugging_face import LOSS, off_policy
from anytron.verification.observation import plan_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.trainer.updates import UpdatePlan
    from anytron.trainer.workers import TrainingWorkers

ALONE, TOGETHER = 1, 10**9
"""``max_tokens`` of micro-batches of one sequence each, and of as few micro-batches as there can be."""


@dataclass(frozen=True)
class Share:
    """A batch, and how it is divided.

    Attributes:
        name: For people.
        batch: Its sequences.
        max_tokens: Tokens of a micro-batch at most.
    """

    name: str
    batch: RaggedBatch
    max_tokens: int


@dataclass(frozen=True)
class Computed:
    """What an engine computes of a share.

    Attributes:
        log_probs: float32 ``[T]``.
        gradients: float32, by the weights' names in files.
    """

    log_probs: Tensor
    gradients: dict[str, Tensor]


def short_lengths(context_parallel: int) -> tuple[int, ...]:
    """Lengths of sequences around the number of context-parallel ranks, which share 2 chunks of each sequence."""
    around = {1, 2, 3, context_parallel - 1, context_parallel, 2 * context_parallel + 1}
    return tuple(sorted(around - {0}))


def empty_shares(batch: RaggedBatch, context_parallel: int) -> tuple[Share, ...]:
    """Cut short sequences out of a batch, and divide them so that something is without work.

    Args:
        batch: Of sampled or recorded trajectories; the first sequence with images is taken as it is.
        context_parallel: Ranks that share each sequence.
    """
    whole = _with_images(batch, _texts(batch, short_lengths(context_parallel)))
    one = _texts(batch, (3,))
    return (
        Share("each short sequence alone", whole, ALONE),
        Share("short sequences in one pack", whole, TOGETHER),
        Share("one sequence for all replicas", one, ALONE),
    )


def _texts(batch: RaggedBatch, lengths: Sequence[int]) -> RaggedBatch:
    """Take the tokens of responses, one after another, as sequences of these lengths, the first token as the prompt."""
    written = batch.response_mask.nonzero()[:, 0]
    places = written[torch.arange(sum(lengths)) % len(written)]
    starts = torch.tensor([sum(lengths[:index]) for index in range(len(lengths))])
    trained = torch.ones(len(places), dtype=torch.bool).index_fill(0, starts, False)
    return RaggedBatch(
        lengths=torch.tensor(lengths),
        tokens=batch.tokens[places],
        response_mask=trained,
        temperature=batch.temperature,
        advantages=torch.ones(len(places)) * trained,
        images=None if batch.images is None else (None,) * len(lengths),
    )


def _with_images(batch: RaggedBatch, texts: RaggedBatch) -> RaggedBatch:
    """Put the first sequence that has images behind the texts."""
    index = next((index for index, one in enumerate(batch.images or ()) if one is not None), None)
    if index is None or batch.images is None or texts.images is None:
        return texts
    seen = batch.select(torch.tensor([index]))
    joined: dict[str, Any] = {
        field.name: torch.cat([getattr(texts, field.name), getattr(seen, field.name)])
        for field in fields(RaggedBatch)
        if isinstance(getattr(texts, field.name), Tensor) and isinstance(getattr(seen, field.name), Tensor)
    }
    return replace(texts, **joined, images=(*texts.images, batch.images[index]))


def mini_batch_of(share: Share, trainer: TrainingWorkers, config: RunConfig) -> tuple[RaggedBatch, Tensor, UpdatePlan]:
    """Score a share; give it with what a loss reads, its log-probs float32 ``[T]``, and the plan of its update."""
    plan = replace(plan_of(trainer, config), max_tokens=share.max_tokens)
    batch = next(plan.mini_batches(share.batch, config.trainer.seed))
    log_probs = trainer.token_outputs(batch, plan, "policy").log_probs
    assert log_probs is not None, "every engine computes log-probs"
    return off_policy(batch, log_probs), log_probs, plan


def compute_share(share: Share, trainer: TrainingWorkers, config: RunConfig, directory: Path) -> Computed:
    """Score a share, and compute the gradients of an update on it; nothing is updated.

    Args:
        share: The share.
        trainer: Ranks whose engine declares ``gradients``.
        config: Theirs.
        directory: Holds gradients on their way.
    """
    batch, log_probs, plan = mini_batch_of(share, trainer, config)
    return Computed(log_probs, computed_gradients(trainer, plan, batch, directory, LOSS)[0])
