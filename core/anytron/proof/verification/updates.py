"""Compare updates of the weights with torch's optimizer, and the adapters after an update with transformers.

New adapters are 0: they do not change the forward pass, and one of their two factors has no gradient. So adapters are
compared after an update.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import Result, of_error
from anytron.proof.verification.comparisons import FACTORS, compare_sampled, joined, largest, measured, tolerance
from anytron.proof.verification.engines import VALUE_LOSS, off_value, plan_of
from anytron.proof.verification.gradients import adapter_gradients, compare_gradients, computed_gradients, own_batch
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron.proof.verification.rates import rates_of, shortened
from anytron.proof.verification.weights import stored_weights
from anytron.run.preflight.capabilities import shows_gradients
from anytron.run.trainer.models import model_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.config.running import OptimizerSection
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import UpdatedModel


VISIBLE = {"lr": 1e-2, "min_lr": 1e-2, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1}
"""Settings with which an update moves weights by more than their rounding; all other settings are the run's."""
UPDATES = 2
"""Updates that are compared: in the first, a fault in what the optimizer keeps for the next one would not show."""
NORM_FACTORS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Allowed relative difference of the norm by which gradients are clipped, by the weights' element type."""
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


def with_decaying_rate(config: RunConfig) -> RunConfig:
    """Make the learning rate of the second visible update another one than that of the first."""
    config = shortened(with_visible_update(config), steps=UPDATES, updates=1)
    decay = {"schedule": "linear", "min_lr": 0.0}
    critic = config.critic
    if critic is not None:
        optimizer = critic.optimizer.model_copy(update=decay)
        critic = critic.model_copy(update={"optimizer": optimizer, "warmup_steps": 0})
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=decay), "critic": critic})


def check_optimizer(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare, for policy and critic, how updates change the weights with what torch's optimizer would do.

    The norm by which the engine clips gradients is compared with the norm of the exported gradients.

    Args:
        check: Name of the check.
        config: Configuration that the trainer was built with, from :func:`with_decaying_rate`.
        trainer: The training ranks, whose engine declares ``gradients``; the check changes their weights.
        batch: Sampled responses with advantages, T tokens.

    Raises:
        EngineError: The engine cannot compute the gradients.
    """
    directory = Path(config.trainer.output_dir)
    plan = plan_of(trainer, config)
    results = []
    for model, section in trained_models(config):
        weights, gradients, norms = [trained_weights(trainer, config, model, directory)], [], []
        for _ in range(UPDATES):
            given, loss = off_policy_batch(config, trainer, plan, batch, model)
            found, _ = computed_gradients(trainer, plan, given, directory, loss, model=model, additions="all")
            if model == "policy":
                grad_norm = trainer.update(given, plan, loss)["grad_norm"]
            else:
                grad_norm = trainer.update_critic(given, plan, loss)["critic/grad_norm"]
            if config.model.lora is None:  # the file of an adapter has copies of some factors
                norms.append((grad_norm, math.sqrt(sum(float(one.double().square().sum()) for one in found.values()))))
            factor = min(1.0, (section.clip_grad or float("inf")) / (grad_norm + 1e-6))
            gradients.append({name: factor * gradient for name, gradient in found.items()})
            weights.append(trained_weights(trainer, config, model, directory))
        norm = compare_norms(check, norms, dtype=config.model.dtype) if norms else None
        rates = rates_of(section, UPDATES, 1)
        moves = compare_moves(check, weights, gradients, section=section, dtype=config.model.dtype, rates=rates)
        results.append(norm if norm is not None and norm.status == "failed" else moves)
    return joined(results)


def off_policy_batch(
    config: RunConfig, trainer: TrainingWorkers, plan: UpdatePlan, batch: RaggedBatch, model: UpdatedModel
) -> tuple[RaggedBatch, LossFunction]:
    """Make a mini-batch that is slightly off the model's present weights, and choose the loss of the model.

    Args:
        config: Configuration of the run.
        trainer: The training ranks.
        plan: Division of the batch into micro-batches and over the ranks.
        batch: Sampled responses with advantages.
        model: The model to update.
    """
    batch = own_batch(config, trainer, plan, batch)
    if model == "policy":
        return batch, LOSS
    values = trainer.with_values(batch, plan).values
    assert values is not None, "the ranks compute them"
    return off_value(batch, values), VALUE_LOSS


def trained_models(config: RunConfig) -> Iterator[tuple[UpdatedModel, OptimizerSection]]:
    """Yield the models that a run updates, each with the configuration of its optimizer."""
    yield "policy", config.optimizer
    if config.critic is not None:
        yield "critic", config.critic.optimizer


def compare_norms(check: str, norms: Sequence[tuple[float, float]], *, dtype: str) -> Result:
    """Compare the norms that an engine computes of its gradients, for clipping, with the norms of these gradients.

    Args:
        check: Name of the check.
        norms: For each update, the engine's L2 norm and that of the exported gradients.
        dtype: Element type of the weights.
    """
    found, right = max(norms, key=lambda pair: abs(pair[0] - pair[1]) / max(pair[1], 1e-12))
    detail = f"gradients are clipped by a norm of {found:.6g}, but the norm of the exported ones is {right:.6g}"
    return measured(check, abs(found - right) / max(right, 1e-12), NORM_FACTORS[dtype], detail)


def compare_moves(
    check: str,
    weights: Sequence[Mapping[str, Tensor]],
    gradients: Sequence[Mapping[str, Tensor]],
    *,
    section: OptimizerSection,
    dtype: str,
    rates: Sequence[float] = (),
) -> Result:
    """Compare how updates change weights with updates by torch's optimizer, in float64 and from a new state.

    Args:
        check: Name of the check.
        weights: Weights by name before the first update, and after each update.
        gradients: For each update, the gradients after clipping, float32, of every weight that is trained, by the same
            names.
        section: The configuration of the optimizer.
        dtype: Element type of the weights.
        rates: The learning rate of each update; empty = that of ``section``.
    """
    rates = rates or [section.lr] * len(gradients)
    size = max((largest(gradient) for update in gradients for gradient in update.values()), default=0.0)
    differences = {
        name: _difference([one[name] for one in weights], [one[name] for one in gradients], size, section, name, rates)
        for name in gradients[0]
    }
    limit = 10 * FACTORS[dtype]
    worst = sorted(differences, key=lambda name: -differences[name])
    wrong = [name for name in worst if not differences[name] <= limit]
    torchs = "AdamW" if section.name == "adam" else "SGD"
    updates = "one update" if len(gradients) == 1 else f"{len(gradients)} updates"
    what = f"{len(worst)} weights after {updates} with lr {section.lr:g} and weight decay {section.weight_decay:g}"
    if not wrong:
        return measured(check, differences[worst[0]], limit, f"{what}, the worst is {worst[0]}")
    still = sum(torch.equal(weights[0][name], weights[-1][name]) for name in wrong)
    named = ", ".join(f"{name} by {differences[name]:.2g} of its step" for name in wrong[:SHOWN])
    detail = f"{len(wrong)} of {what} differ from torch's {torchs} with the same gradients, {named}"
    detail += f"; {still} of them have not moved" if still else ""
    return measured(check, differences[wrong[0]], limit, f"{detail}: look at the {section.name} kernel")


def _difference(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    size: float,
    section: OptimizerSection,
    name: str,
    rates: Sequence[float],
) -> float:
    """The largest error of a weight's entries, as a part of the largest step that one of them takes.

    Rounding, and the effect of a possible error of the gradients, are subtracted.
    """
    # A file may have the biases of all experts in one tensor (gate_up_proj_bias of gpt-oss); each has one dimension.
    decay = 0.0 if weights[0].ndim == 1 or name.endswith((".bias", "_bias")) else section.weight_decay
    exact = [gradient.double() for gradient in gradients]
    noises = [_NOISE * largest(gradient) + _NOISE_OF_ALL * size for gradient in exact]
    starts = [one.double() for one in weights[:-1]]
    moves = _moves(section, starts, exact, decay, rates)
    others = [
        _moves(
            section,
            starts,
            [one + sign * noise for one, sign, noise in zip(exact, signs, noises, strict=True)],
            decay,
            rates,
        )
        for signs in itertools.product((1, -1), repeat=len(exact))
    ]
    worst = 0.0
    for number, (start, move, after) in enumerate(zip(starts, moves, weights[1:], strict=True)):
        allowed = torch.stack([(other[number] - move).abs() for other in others]).amax(0)
        rounding = torch.finfo(after.dtype).eps * (start + move).abs()
        error = (after.double() - start - move).abs() - allowed - rounding
        if not bool(error.isfinite().all()):
            return torch.inf
        worst = max(worst, float(error.max().clamp(min=0.0) / max(largest(move), 1e-12)))
    return worst


def _moves(
    section: OptimizerSection,
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor],
    decay: float,
    rates: Sequence[float],
) -> list[Tensor]:
    """Return how torch's optimizer, from a new state, moves a weight in each update."""
    weight = torch.nn.Parameter(starts[0].clone())
    build: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    settings: dict[str, object] = {"lr": section.lr, "weight_decay": decay}
    if section.name == "adam":
        build, settings = torch.optim.AdamW, {**settings, "betas": (section.beta1, section.beta2), "eps": section.eps}
    optimizer = build([weight], **settings)
    moves = []
    for start, gradient, rate in zip(starts, gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.data.copy_(start)
        weight.grad = gradient
        optimizer.step()
        moves.append(weight.detach() - start)
    return moves


def trained_weights(
    trainer: TrainingWorkers, config: RunConfig, model: UpdatedModel, directory: Path
) -> dict[str, Tensor]:
    """Export the weights that are trained, by their names in files: adapters by themselves, if the run has some.

    Args:
        trainer: The training ranks.
        config: Configuration of the run.
        model: The model whose weights are exported.
        directory: Directory for the file, which is deleted.
    """
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


def check_following(
    check: str,
    config: RunConfig,
    trainer: TrainingWorkers,
    batch: RaggedBatch,
    sample: Callable[[TrainingWorkers], RaggedBatch],
) -> Result:
    """Do an update, give the rollout engine the new weights, and compare the log-probs of what it samples then.

    Args:
        check: Name of the check.
        config: Configuration that the trainer was built with, from :func:`with_visible_update`.
        trainer: The training ranks; the check changes their weights.
        batch: Responses that were sampled before the update, with advantages.
        sample: Gives the ranks' weights to the rollout engine, and samples responses.
    """
    plan = plan_of(trainer, config)
    before = trainer.score(batch, plan, "policy")
    trainer.update(own_batch(config, trainer, plan, batch), plan, LOSS)
    moved = largest((trainer.score(batch, plan, "policy") - before)[batch.response_mask])
    if moved <= FACTORS[config.model.dtype]:
        return Result(check, "skipped", f"the update moved log-probs by only {moved:.2g}, too little for a comparison")
    batch = sample(trainer)
    what = f"after an update that moved log-probs by up to {moved:.2g}"
    return compare_sampled(check, config.model.dtype, batch, trainer.score(batch, plan, "policy"), what)
