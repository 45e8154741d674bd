"""x"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.proof.verification.comparisons import largest, measured, tolerance
from anytron.proof.verification.engines import plan_of
from anytron.proof.verification.gradients import adapter_gradients, compare_gradients, computed_gradients, own_batch
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron.run.preflight.capabilities import shows_gradients
from anytron.run.trainer.models import model_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch


_SHARED = ("embed_tokens.weight", "lm_head.weight")


def tied_copies(these: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> set[str]:
    """Name what only these tensors hold, if it is equal to an embedding or an output layer that both hold."""
    shared = [these[name] for name in others if name.endswith(_SHARED) and name in these]
    return {name for name in these.keys() - others.keys() if any(torch.equal(these[name], one) for one in shared)}


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory, on the host."""
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def compare_weights(check: str, stored: Mapping[str, Tensor], exported: Mapping[str, Tensor], detail: str) -> Result:
    """Compare tensors bit for bit.

    Args:
        check: Name of the check.
        stored: The checkpoint.
        exported: The engine's, in its own dtype.
        detail: What else there is to say if they are equal.
    """
    missing = sorted(stored.keys() - exported.keys() - tied_copies(stored, exported))
    unknown = sorted(exported.keys() - stored.keys())
    if missing or unknown:
        where = "the checkpoint only" if missing else "the export only"
        first = (missing or unknown)[0]
        count = len(missing) + len(unknown)
        return Result(check, "failed", f"{count} tensors are in one of the two; the first, {first}, is in {where}")
    worst, unequal = 0.0, []
    for name, tensor in exported.items():
        original = stored[name].to(tensor.dtype)
        if not torch.equal(tensor, original):
            unequal.append(name)
            worst = max(worst, float((tensor.double() - original.double()).abs().max()))
    if unequal:
        detail = f"{len(unequal)} differ, the first is {unequal[0]}"
    # torch.equal compares values: zeros of different signs are equal.
    return measured(check, worst, 0.0, detail)


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
