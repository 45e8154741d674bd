"""Make a sequence as long as the run's longest, in which what only far positions have shows.

Sampled responses are short, to save time. Positions that are counted in half precision, tables of angles that end too
early, and windows of attention that are longer than these responses, show in a long sequence only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.proof.checks import Inapplicable
from anytron.proof.verification.empty_shares import texts
from anytron.proof.verification.engines import MAX_NEW_TOKENS, Trajectories
from anytron.run.trainer.models import model_directory
from anytron.task.data.pretrained import read_hf_config
from anytron.workers.engines.rollout_engine import PromptInputs

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.sequences.batch import RaggedBatch

LONGEST = 1024
"""Tokens of a sequence that is computed: beyond 256, where bfloat16 can no longer count, and quick on a host."""


def longest_of(config: RunConfig, batch: RaggedBatch) -> int:
    """Return how long a sequence of the run may be, at most :data:`LONGEST`.

    Args:
        config: Configuration of the run.
        batch: Sampled responses with their prompts.
    """
    context = getattr(read_hf_config(model_directory(config)).get_text_config(), "max_position_embeddings", None)
    most = min(LONGEST, context or LONGEST)
    if config.supervised:  # its responses come from files
        return most
    prompts = int((batch.lengths - batch.response_counts).max())
    return min(most, prompts + config.rollout.max_new_tokens)


def long_sequence(config: RunConfig, batch: RaggedBatch) -> Trajectories:
    """Make one long sequence of the sampled tokens, one after another.

    Args:
        config: Configuration of the run.
        batch: Sampled responses with their prompts.

    Raises:
        Inapplicable: The responses of the batch are as long as those of the run, or its routing is replayed.
    """
    if batch.routing is not None:
        raise Inapplicable("the run replays the rollout's routing, which a made-up sequence has not")
    most = config.rollout.max_new_tokens
    if most <= MAX_NEW_TOKENS and not config.supervised:
        raise Inapplicable(f"the run's responses have at most {most} tokens, as other checks have")
    long = texts(batch, (longest_of(config, batch),))
    return Trajectories([], [], long, [PromptInputs(tuple(long.tokens.tolist()), None)])
