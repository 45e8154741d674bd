"""Compare a reward model's scores with transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import of_error
from anytron.proof.verification.comparisons import largest, measured, tolerance
from anytron.proof.verification.hugging_face import computed_by_transformers, load_model

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.reward_model import RewardModelRanks
    from anytron.sequences.batch import RaggedBatch


def expected_scores(directory: Path, dtype: torch.dtype, batch: RaggedBatch) -> Tensor:
    """Compute scores with ``AutoModelForSequenceClassification``, sequence by sequence: float32 ``[B]``.

    Args:
        directory: The reward model's.
        dtype: What the weights are rounded to before anything is computed with them, in float32.
        batch: B sequences.

    Raises:
        ResourceError: The host has not enough memory.
        EngineError: transformers cannot compute it.
    """
    with computed_by_transformers(directory), torch.no_grad():
        model = load_model(directory, None, dtype, scores=True)
        sequences = batch.tokens.split(batch.lengths.tolist())
        return torch.cat([model(tokens[None], use_cache=False).logits[:, 0] for tokens in sequences])


def check_scores(check: str, config: RunConfig, ranks: RewardModelRanks, batch: RaggedBatch) -> Result:
    """Let the ranks of the reward model and transformers score responses.

    Args:
        check: Name of the check.
        config: The run, with its ``reward_model``.
        ranks: The reward model's.
        batch: Sampled responses, of the policy's: those that a run has scored.

    Raises:
        EngineError: transformers cannot compute the reward model.
    """
    assert config.reward_model is not None
    try:
        right = expected_scores(Path(config.reward_model.path), getattr(torch, config.model.dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    found = ranks.scores(batch)
    detail = f"{len(right)} sequences, scores from {float(right.min()):.3g} to {float(right.max()):.3g}"
    return measured(check, largest(found - right), tolerance(config.model.dtype, right), detail)
