"""Micro-batches in which some rank, stage, replica or expert has no work, and checks of an engine on them.

Some lengths are below the number of context-parallel ranks, others above. A sequence of one token has no next token to
predict, and leaves most experts without a token. With fewer sequences than replicas, some replicas only run filler
micro-batches. Only one sequence, hence one replica, has images.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.proof.verification.comparisons import largest, measured, tolerance
from anytron.proof.verification.engines import VALUE_LOSS, off_value, plan_of
from anytron.proof.verification.gradients import compare_gradients, computed_gradients
from anytron.proof.verification.hugging_face import LOSS, off_policy
from anytron.run.preflight.capabilities import shows_gradients
from anytron.sequences.batch import RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers

ALONE, TOGETHER = 1, 10**9
"""``max_tokens`` for micro-batches of one sequence each, and for as few micro-batches as possible."""


@dataclass(frozen=True)
class Share:
    """A batch, and how it is divided into micro-batches.

    Attributes:
        name: Name of the share, for messages.
        batch: Sequences of the share.
        max_tokens: Largest number of tokens in a micro-batch.
    """

    name: str
    batch: RaggedBatch
    max_tokens: int


@dataclass(frozen=True)
class Computed:
    """What an engine computes from a share.

    Attributes:
        log_probs: Log-probs of the tokens, float32 ``[T]``.
        gradients: Gradients of the weights, float32, by the weights' names in files.
    """

    log_probs: Tensor
    gradients: dict[str, Tensor]


def short_lengths(context_parallel: int) -> tuple[int, ...]:
    """Return lengths below and above the number of context-parallel ranks, each of which has 2 chunks of a sequence."""
    around = {1, 2, 3, context_parallel - 1, context_parallel, 2 * context_parallel + 1}
    return tuple(sorted(around - {0}))


def empty_shares(batch: RaggedBatch, context_parallel: int) -> tuple[Share, ...]:
    """Cut short sequences out of a batch, and divide them so that some rank, replica or expert has no work.

    Args:
        batch: Sampled or recorded trajectories; the first sequence with images is used unchanged.
        context_parallel: Ranks that share each sequence.
    """
    whole = _with_images(batch, texts(batch, short_lengths(context_parallel)))
    one = texts(batch, (3,))
    return (
        Share("each short sequence alone", whole, ALONE),
        Share("short sequences in one pack", whole, TOGETHER),
        Share("one sequence for all replicas", one, ALONE),
    )


def texts(batch: RaggedBatch, lengths: Sequence[int]) -> RaggedBatch:
    """Take the tokens of responses, one after another and again, as sequences with a prompt of one token.

    Args:
        batch: Sampled or recorded trajectories.
        lengths: Length of each sequence.
    """
    # The last token of a sequence has no routing.
    written = batch.response_mask.index_fill(0, batch.lengths.cumsum(0) - 1, False).nonzero()[:, 0]
    written = written if len(written) else batch.response_mask.nonzero()[:, 0]
    places = written[torch.arange(sum(lengths)) % len(written)]
    starts = torch.tensor([sum(lengths[:index]) for index in range(len(lengths))])
    trained = torch.ones(len(places), dtype=torch.bool).index_fill(0, starts, False)
    return RaggedBatch(
        lengths=torch.tensor(lengths),
        tokens=batch.tokens[places],
        response_mask=trained,
        temperature=batch.temperature,
        advantages=torch.ones(len(places)) * trained,
        routing=None if batch.routing is None else batch.routing[places],
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
    """Score a share; return a batch that a loss can read, its log-probs float32 ``[T]``, and the plan of its update."""
    plan = replace(plan_of(trainer, config), max_tokens=share.max_tokens)
    batch = next(plan.mini_batches(share.batch, config.trainer.seed)).batch
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    batch = batch.scored(scored) if plan.replays_scoring else batch
    return off_policy(batch, scored.log_probs), scored.log_probs, plan


def compute_share(share: Share, trainer: TrainingWorkers, config: RunConfig, directory: Path) -> Computed:
    """Score a share, and compute the gradients of an update on it; nothing is updated.

    Args:
        share: The share.
        trainer: Ranks whose engine declares ``gradients``.
        config: Configuration of the ranks.
        directory: Directory for the files of the gradients.
    """
    batch, log_probs, plan = mini_batch_of(share, trainer, config)
    return Computed(log_probs, computed_gradients(trainer, plan, batch, directory, LOSS)[0])


def check_empty_shares(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare short sequences, one in each micro-batch, with the same sequences in one pack; try update and export.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        trainer: Training ranks of the run; the check changes their weights.
        batch: Sampled responses.
    """
    dtype, directory = config.model.dtype, Path(config.trainer.output_dir)
    alone, together, one = empty_shares(batch, config.parallel.context_parallel_size)
    gradients: list[dict[str, Tensor]] = []
    log_probs: list[Tensor] = []
    if shows_gradients(config):
        for share in (alone, together, one):
            computed = compute_share(share, trainer, config, directory)
            gradients.append(computed.gradients)
            log_probs.append(computed.log_probs)
    else:
        log_probs = [mini_batch_of(share, trainer, config)[1] for share in (alone, together, one)]
    _update_and_export(alone, trainer, config, directory)
    lengths = " ".join(str(length) for length in alone.batch.lengths.tolist())
    detail = f"sequences of {lengths} tokens, each alone and in one pack"
    result = measured(
        check, largest(log_probs[0] - log_probs[1]), tolerance(dtype, log_probs[1]), f"log-probs of {detail}"
    )
    if result.status != "passed" or not any(gradient.any() for each in gradients[:2] for gradient in each.values()):
        return result
    return compare_gradients(
        check, *gradients[:2], dtype=dtype, skipped={}, what=f"gradients of {detail}", whose="the pack's"
    )


def _update_and_export(share: Share, trainer: TrainingWorkers, config: RunConfig, directory: Path) -> None:
    """Do an update of each model and an export, in which ranks also wait for one another.

    Raises:
        EngineError: A rank failed, or did not take part.
    """
    batch, _, plan = mini_batch_of(share, trainer, config)
    trainer.update(batch, plan, LOSS)
    if config.critic is not None:
        values = trainer.with_values(batch, plan).values
        assert values is not None, "the ranks compute them"
        trainer.update_critic(off_value(batch, values), plan, VALUE_LOSS)
    file = directory / "empty_shares.safetensors"
    trainer.export_weights(str(file))
    file.unlink()
