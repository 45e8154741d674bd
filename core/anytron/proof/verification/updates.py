"""Compare one update of the weights with torch's optimizer, and the adapters after an update with transformers.

New adapters are 0: they do not change the forward pass, and one of their two factors has no gradient. So adapters are
compared after an update.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.proof.verification.comparisons import FACTORS, joined, largest, measured, tolerance
from anytron.proof.verification.engines import VALUE_LOSS, off_value, plan_of
from anytron.proof.verification.gradients import adapter_gradients, compare_gradients, computed_gradients, own_batch
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron.proof.verification.weights import stored_weights
from anytron.run.preflight.capabilities import shows_gradients
from anytron.run.trainer.models import model_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.config.running import OptimizerSection
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import UpdatedModel


VISIBLE = {"lr": 1e-2, "min_lr": 1e-2, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1}
"""Settings with which an update moves weights by more than their rounding; all other settings are the run's."""
SHOWN = 3
_NOISE = 1e-3
"""Part of a weight's largest gradient by which the gradient in the update may differ from the exported one: some
devices do not add up in the same order twice."""
_NOISE_OF_ALL = 1e-5
"""As :data:`_NOISE`, but a part of the largest gradient of all weights: what rounding leaves of a gradient of 0."""


def with_visible_update(config: RunConfig) -> RunConfig:
    """Set the run's optimizers so that each part of an update, weight decay included, is large enough to measure."""
    critic = config.critic
    if critic is not None:
        critic = critic.model_copy(update={"optimizer": critic.optimizer.model_copy(update=VISIBLE)})
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=VISIBLE), "critic": critic})


def check_optimizer(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare, for policy and critic, how one update changes the weights with what torch's optimizer would do.

    Args:
        check: Name of the check.
        config: Configuration that the trainer was built with, from :func:`with_visible_update`.
        trainer: The training ranks, whose engine declares ``gradients``; the check changes their weights.
        batch: Sampled responses with advantages, T tokens.

    Raises:
        EngineError: The engine cannot compute the gradients.
    """
    directory = Path(config.trainer.output_dir)
    plan = plan_of(trainer, config)
    batch = own_batch(config, trainer, plan, batch)
    results = []
    for model, section in _optimizers(config):
        loss: LossFunction = LOSS
        if model == "critic":
            values = trainer.with_values(batch, plan).values
            assert values is not None, "the ranks compute them"
            loss, batch = VALUE_LOSS, off_value(batch, values)
        before = _weights(trainer, config, model, directory)
        gradients, _ = computed_gradients(trainer, plan, batch, directory, loss, model=model, additions="all")
        if model == "policy":
            grad_norm = trainer.update(batch, plan, loss)["grad_norm"]
        else:
            grad_norm = trainer.update_critic(batch, plan, loss)["critic/grad_norm"]
        after = _weights(trainer, config, model, directory)
        factor = min(1.0, (section.clip_grad or float("inf")) / (grad_norm + 1e-6))
        clipped = {name: factor * gradient for name, gradient in gradients.items()}
        results.append(compare_moves(check, before, after, clipped, section=section, dtype=config.model.dtype))
    return joined(results)


def _optimizers(config: RunConfig) -> Iterator[tuple[UpdatedModel, OptimizerSection]]:
    yield "policy", config.optimizer
    if config.critic is not None:
        yield "critic", config.critic.optimizer


def compare_moves(
    check: str,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    *,
    section: OptimizerSection,
    dtype: str,
) -> Result:
    """Compare how one update changes weights with an update by torch's optimizer, in float64 and from a new state.

    Args:
        check: Name of the check.
        before: Weights before the update, by name.
        after: The same weights after the update.
        gradients: Gradients after clipping, float32, of every weight that is trained, by the same names.
        section: The configuration of the optimizer.
        dtype: Element type of the weights.
    """
    size = max((largest(gradient) for gradient in gradients.values()), default=0.0)
    differences = {
        name: _difference(before[name], after[name], gradient, size, section, name)
        for name, gradient in gradients.items()
    }
    limit = 10 * FACTORS[dtype]
    worst = sorted(differences, key=lambda name: -differences[name])
    wrong = [name for name in worst if not differences[name] <= limit]
    torchs = "AdamW" if section.name == "adam" else "SGD"
    what = f"{len(worst)} weights after one update with lr {section.lr:g} and weight decay {section.weight_decay:g}"
    if not wrong:
        return measured(check, differences[worst[0]], limit, f"{what}, the worst is {worst[0]}")
    still = sum(torch.equal(before[name], after[name]) for name in wrong)
    named = ", ".join(f"{name} by {differences[name]:.2g} of its step" for name in wrong[:SHOWN])
    detail = f"{len(wrong)} of {what} differ from torch's {torchs} with the same gradients, {named}"
    detail += f"; {still} of them have not moved" if still else ""
    return measured(check, differences[wrong[0]], limit, f"{detail}: look at the {section.name} kernel")


def _difference(
    before: Tensor, after: Tensor, gradient: Tensor, size: float, section: OptimizerSection, name: str
) -> float:
    """The largest error of a weight's entries, as a part of the largest step that one of them takes.

    Rounding, and the effect of a possible error of the gradient, are subtracted.
    """
    # A file may have the biases of all experts in one tensor (gate_up_proj_bias of gpt-oss); each has one dimension.
    decay = 0.0 if before.ndim == 1 or name.endswith((".bias", "_bias")) else section.weight_decay
    start, exact = before.double(), gradient.double()
    noise = _NOISE * largest(exact) + _NOISE_OF_ALL * size
    move = _moved(section, start, exact, decay)
    allowed = torch.stack([(_moved(section, start, exact + by, decay) - move).abs() for by in (noise, -noise)]).amax(0)
    rounding = torch.finfo(before.dtype).eps * (start + move).abs()
    error = (after.double() - start - move).abs() - allowed - rounding
    return float(error.max().clamp(min=0.0) / max(largest(move), 1e-12)) if bool(error.isfinite().all()) else torch.inf


def _moved(section: OptimizerSection, start: Tensor, gradient: Tensor, decay: float) -> Tensor:
    weight = torch.nn.Parameter(start.clone())
    weight.grad = gradient
    build: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    settings: dict[str, object] = {"lr": section.lr, "weight_decay": decay}
    if section.name == "adam":
        build, settings = torch.optim.AdamW, {**settings, "betas": (section.beta1, section.beta2), "eps": section.eps}
    build([weight], **settings).step()
    return weight.detach() - start


def _weights(trainer: TrainingWorkers, config: RunConfig, model: UpdatedModel, directory: Path) -> dict[str, Tensor]:
    """Export the weights that are trained: adapters by themselves, if the run has some."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        if model == "critic":
            trainer.save_critic(folder)
        else:
            trainer.export_weights(f"{folder}/model.safetensors", "weights" if config.model.lora is None else "adapter")
        return stored_weights(Path(folder))


def without_dropout(config: RunConfig) -> RunConfig:
    """Set the dropout of adapters to 0, because random numbers would differ between two computations."""
    if config.model.lora is None:
        return config
    lora = config.model.lora.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def check_adapters(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Do an update; then compare log-probs, and gradients of both factors of each adapter, with those of transformers.

    Args:
        check: Name of the check.
        config: Configuration that the trainer was built with, from :func:`with_visible_update`.
        trainer: The training ranks; the check changes their weights.
        batch: Sampled responses with advantages.

    Raises:
        EngineError: transformers cannot run the model.
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
        return Result(check, "skipped", f"the update moved log-probs by only {moved:.2g}, too little for a comparison")
    detail = f"log-probs of {len(right)} tokens, which an update of adapters has moved by up to {moved:.2g}"
    values = measured(check, largest(found - right), limit, detail)
    if values.status == "failed" or not shows_gradients(config):
        return values
    gradients, _ = computed_gradients(trainer, plan, expected.batch, directory)
    wanted = adapter_gradients(factors, expected.gradients, config.model.lora.scaling)
    what, forward = f"factors of adapters; {detail}", values.difference or 0.0
    return compare_gradients(check, gradients, wanted, dtype=dtype, skipped={}, what=what, forward=forward)
