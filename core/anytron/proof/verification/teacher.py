"""Compare a teacher's log-probs with transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import of_error
from anytron.proof.verification.comparisons import compare_token_outputs
from anytron.proof.verification.engines import first_sequences, plan_of, temperatures
from anytron.proof.verification.hugging_face import computed_by_transformers, expected_logits

if TYPE_CHECKING:
    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch


def check_teacher(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Let the training ranks and transformers score the first sequences with the teacher.

    Args:
        check: Name of the check.
        config: The run, with its ``teacher``.
        trainer: Its training ranks.
        batch: Sampled responses, of the policy's: those that a run asks its teacher about.

    Raises:
        EngineError: transformers cannot compute the teacher.
    """
    assert config.teacher is not None
    directory, first = Path(config.teacher.path), first_sequences(batch)
    try:
        with computed_by_transformers(directory):
            logits = expected_logits(directory, getattr(torch, config.model.dtype), first)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    plan = plan_of(trainer, config)
    found = {
        temperature: trainer.token_outputs(replace(first, temperature=temperature), plan, "teacher")
        for temperature in temperatures(config)
    }
    return compare_token_outputs(check, config.model.dtype, logits, first, found)
