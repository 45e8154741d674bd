"""Compare adapters that an update has moved with transformers' model of the merged weights.

New adapters are 0: a forward pass without them computes the same, and one of their two factors has no gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.proof.verification.comparisons import largest
from anytron.proof.verification.gradient_differences import adapter_gradients, compare_gradients
from anytron.proof.verification.gradients import computed_gradients, own_batch
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron.proof.verification.observation import plan_of
from anytron.proof.verification.report import measured
from anytron.proof.verification.tolerances import tolerance
from anytron.run.preflight.capabilities import shows_gradients
from anytron.run.trainer.initial_model import model_directory

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch


def without_dropout(config: RunConfig) -> RunConfig:
    """Leave out the dropout of adapters: what is drawn at random is not the same twice."""
    if config.model.lora is None:
        return config
    lora = config.model.lora.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def check_adapters(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Do an update; then compare log-probs, and the gradients of both factors of each adapter.

    Args:
        check: Its name.
        config: What the trainer was built with, :func:`~anytron.proof.verification.optimizer.with_visible_update`.
        trainer: The training ranks; their weights are others afterwards.
        batch: Sampled responses with advantages.

    Raises:
        EngineError: transformers cannot compute the model.
    """
    from safetensors.torch import load_file

    assert config.model.lora is not None
    directory, dtype = Path(config.trainer.output_dir), config.model.dtype
    plan = plan_of(trainer, config)
    first = own_batch(config, trainer, plan, batch)
    before = trainer.score(first, plan, "policy")
    trainer.update(first, plan, LOSS)
    batch = own_batch(config, trainer, plan, batch)  # with the experts that routers choose now
    merged, alone = directory / "merged.safetensors", directory / "adapter.safetensors"
    trainer.export_weights(str(merged))
    trainer.export_weights(str(alone), "adapter")
    factors = load_file(alone)
    try:
        expected = expected_gradients(model_directory(config), merged, getattr(torch, dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    finally:
        merged.unlink()
        alone.unlink()
    drawn = batch.response_mask
    found, right = trainer.score(batch, plan, "policy")[drawn], expected.log_probs[drawn]
    limit, moved = tolerance(dtype, right), largest(right - before[drawn])
    if moved <= limit:
        return Result(check, "skipped", f"an update moves log-probs by {moved:.2g} only, which proves nothing")
    detail = f"log-probs of {len(right)} tokens, which an update of adapters has moved by up to {moved:.2g}"
    values = measured(check, largest(found - right), limit, detail)
    if values.status == "failed" or not shows_gradients(config):
        return values
    gradients, _ = computed_gradients(trainer, plan, expected.batch, directory)
    wanted = adapter_gradients(factors, expected.gradients, config.model.lora.scaling)
    return compare_gradients(check, gradients, wanted, dtype=dtype, skipped={}, what=f"factors of adapters; {detail}")
