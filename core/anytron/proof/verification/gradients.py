"""Compare the gradient of each parameter with that of Hugging Face's model, which computes in the driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import of_error
from anytron.proof.verification.gradient_differences import adapter_gradients, compare_gradients, may_be_frozen
from anytron.proof.verification.hugging_face import LOSS, expected_gradients, off_policy
from anytron.proof.verification.observation import first_mini_batch, gradient_temperature, plan_of
from anytron.proof.verification.tied import tied_copies
from anytron.run.trainer.initial_model import model_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Additions, UpdatedModel
    from anytron.workers.weights.transfer import WeightManifest


def check_gradients(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Make the check.

    Args:
        check: Its name.
        config: The run.
        trainer: The training ranks, whose engine declares ``gradients``.
        batch: Sampled responses with advantages; the first of them are computed, as the run's micro-batches.

    Raises:
        EngineError: One of the two cannot compute them.
    """
    from safetensors.torch import load_file

    directory, lora = Path(config.trainer.output_dir), config.model.lora
    plan = plan_of(trainer, config)
    batch = replace(first_mini_batch(config, trainer, batch), temperature=gradient_temperature(config))
    weights: Path | None = None
    adapters: dict[str, Tensor] = {}
    if lora is not None:
        weights, alone = directory / "merged.safetensors", directory / "adapter.safetensors"
        trainer.export_weights(str(weights))
        trainer.export_weights(str(alone), "adapter")
        adapters = load_file(alone)
    try:
        expected = expected_gradients(model_directory(config), weights, getattr(torch, config.model.dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    found, manifest = computed_gradients(trainer, plan, expected.batch, directory)
    wanted = expected.gradients
    if lora is not None:
        what, reasons = "adapters", {"the run trains adapters only (model.lora)": len(wanted)}
        wanted = adapter_gradients(adapters, wanted, lora.scaling)
        unknown = found.keys() - wanted.keys()
    else:
        what, frozen = "parameters", frozen_weights(found, expected.gradients, config)
        reasons = {"frozen (model.freeze)": len(frozen)}
        wanted = {name: gradient for name, gradient in wanted.items() if name not in frozen}
        unknown = found.keys() - wanted.keys() - tied_copies(found, wanted)
    reasons["of multi-token prediction, which transformers does not compute"] = len(unknown & manifest.optional)
    reasons["unknown to Hugging Face's model"] = len(unknown - manifest.optional)
    return compare_gradients(
        check,
        found,
        wanted,
        dtype=config.model.dtype,
        skipped=reasons,
        what=f"{what} at temperature {batch.temperature:g}",
    )


def own_batch(config: RunConfig, trainer: TrainingWorkers, plan: UpdatePlan, batch: RaggedBatch) -> RaggedBatch:
    """Take the first sequences as a mini-batch whose policy and reference are a little off the engine's own.

    Args:
        config: The run.
        trainer: The training ranks.
        plan: How they divide a batch.
        batch: Sampled responses with advantages.
    """
    batch = first_mini_batch(config, trainer, batch)
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    batch = off_policy(batch, scored.log_probs)
    return replace(batch, routing=scored.routing) if plan.replays_scoring else batch


def own_gradients(config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> dict[str, Tensor]:
    """Let the engine compute gradients, of :func:`own_batch`; float32, by the weights' names in files."""
    plan = plan_of(trainer, config)
    batch = own_batch(config, trainer, plan, batch)
    return computed_gradients(trainer, plan, batch, Path(config.trainer.output_dir))[0]


def computed_gradients(
    trainer: TrainingWorkers,
    plan: UpdatePlan,
    batch: RaggedBatch,
    directory: Path,
    loss: LossFunction = LOSS,
    *,
    model: UpdatedModel = "policy",
    additions: Additions = "none",
) -> tuple[dict[str, Tensor], WeightManifest]:
    """Let the training engine compute gradients.

    Args:
        trainer: Its ranks.
        plan: How they divide the batch.
        batch: With everything that the loss reads.
        directory: Holds the gradients on their way.
        loss: The loss.
        model: Whose gradients.
        additions: What the engine adds to the loss.

    Returns:
        float32, by the weights' names in files; and what the engine says of them.
    """
    from safetensors.torch import load_file

    if plan.replays_scoring and model == "policy":
        batch = replace(batch, routing=trainer.token_outputs(batch, plan, "policy").routing)
    file = directory / "gradients.safetensors"
    manifest = trainer.export_gradients(str(file), batch, plan, loss, model=model, additions=additions)
    found = load_file(file)
    file.unlink()
    return found, manifest


def frozen_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: RunConfig) -> set[str]:
    """Name the weights whose gradient may be missing, and is."""
    return {name for name in expected.keys() - found.keys() if may_be_frozen(name, config.model.freeze)}
