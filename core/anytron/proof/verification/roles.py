"""Compare the critic, the teacher and the reward model with transformers.

A new value head is 0, which makes every value and every gradient of the critic's trunk 0. So a random head is used.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.errors import ResourceError
from anytron.base.results import of_error
from anytron.proof.verification.comparisons import compare_token_outputs, largest, measured, tolerance
from anytron.proof.verification.engines import (
    VALUE_LOSS,
    first_mini_batch,
    first_sequences,
    off_value,
    plan_of,
    temperatures,
)
from anytron.proof.verification.gradients import compare_gradients, computed_gradients
from anytron.proof.verification.hugging_face import computed_by_transformers, expected_logits, load_model, published
from anytron.proof.verification.weights import compare_weights, stored_weights
from anytron.run.trainer.models import model_directory
from anytron.sequences.batch import TokenOutputs
from anytron.task.data.pretrained import read_hf_config
from anytron.workers.engines.training_engine import VALUE_HEAD, VALUE_HEAD_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.reward_model import RewardModelRanks
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch


def with_drawn_head(config: RunConfig) -> RunConfig:
    """Let the run's critic, if it has one, start with a value head that is not 0.

    Raises:
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    if config.critic is None:
        return config
    origin = model_directory(config) if config.critic.path is None else Path(config.critic.path)
    directory = Path(config.trainer.output_dir).resolve() / "initial_critic"
    write_critic(origin, directory)
    return config.model_copy(update={"critic": config.critic.model_copy(update={"path": str(directory)})})


def write_critic(model: Path, directory: Path) -> None:
    """Make a critic's directory from a model's or another critic's: the same files, and a randomly drawn value head.

    Args:
        model: A model directory.
        directory: Directory to write; it must not exist. All files but the head's become links to the model's.

    Raises:
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.name != VALUE_HEAD_FILE:
            (directory / file.name).symlink_to(file.resolve())
    hidden = read_hf_config(model).get_text_config().hidden_size
    # Behind a norm, where entries are about 1, it gives values of about 1.
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(5)) * hidden**-0.5
    save_file({VALUE_HEAD: head}, directory / VALUE_HEAD_FILE)


@dataclass(frozen=True)
class ExpectedCritic:
    """Values and gradients that transformers computes, float32 on the host.

    Attributes:
        batch: The given batch, with the fields that the critic's loss reads.
        values: Values of the tokens, float32 ``[T]``.
        gradients: Gradients of :data:`~anytron.proof.verification.engines.VALUE_LOSS`, float32, by the weights' names
            in files.
    """

    batch: RaggedBatch
    values: Tensor
    gradients: dict[str, Tensor]


def expected_critic(directory: Path, dtype: torch.dtype, batch: RaggedBatch) -> ExpectedCritic:
    """Compute the critic's values, sequence by sequence, and the gradients of its clipped loss.

    Args:
        directory: Model directory of the critic.
        dtype: Element type to which the trunk's weights are rounded; the head's weights are not rounded.
        batch: B sequences, with ``loss_weights`` and ``token_shares``.

    Raises:
        ResourceError: The host has not enough memory.
        EngineError: transformers cannot run the model.
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    with computed_by_transformers(directory):
        return _computed(directory, dtype, batch)


def _computed(directory: Path, dtype: torch.dtype, batch: RaggedBatch) -> ExpectedCritic:
    from safetensors.torch import load_file

    model = load_model(directory, None, dtype)
    head = load_file(directory / VALUE_HEAD_FILE)[VALUE_HEAD].requires_grad_()
    found: list[Tensor] = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        hidden = model.base_model(tokens[None], use_cache=False).last_hidden_state[0]
        found.append(torch.cat([torch.zeros(1), (hidden @ head[0])[:-1]]))
    values = torch.cat(found)
    batch = off_value(batch, values.detach())
    VALUE_LOSS(TokenOutputs(values=values), batch).loss.backward()
    assert head.grad is not None
    named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return ExpectedCritic(batch, values.detach(), {**published(model, named), VALUE_HEAD: head.grad})


def check_values(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the weights that the critic exports with its initial ones, and its values with those of transformers.

    Args:
        check: Name of the check.
        config: Configuration of the run, as :func:`with_drawn_head` returns it.
        trainer: Training ranks of the run.
        batch: Sampled responses.

    Raises:
        EngineError: transformers cannot run the model.
    """
    assert config.critic is not None
    assert config.critic.path is not None
    exported = Path(config.trainer.output_dir) / "exported_critic"
    trainer.save_critic(str(exported))
    try:
        result = compare_weights(check, stored_weights(Path(config.critic.path)), stored_weights(exported), "")
        if result.status == "failed":
            why = "the critic exports other weights than it was built with"
            return replace(result, detail=f"{why}: {result.detail}")
        batch = first_mini_batch(config, trainer, batch)
        expected = expected_critic(exported, getattr(torch, config.model.dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    finally:
        shutil.rmtree(exported)
    values = trainer.with_values(expected.batch, plan_of(trainer, config)).values
    assert values is not None, "the ranks compute them"
    right = expected.values
    detail = f"{len(right)} tokens, values from {float(right.min()):.3g} to {float(right.max()):.3g}"
    return measured(check, largest(values - right), tolerance(config.model.dtype, right), detail)


def check_value_gradients(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the gradient of each parameter of the critic with transformers'; arguments as for :func:`check_values`.

    transformers runs the critic again, because keeping the gradients of :func:`check_values` would take as much memory
    as the model.

    Raises:
        EngineError: transformers cannot run the model.
    """
    assert config.critic is not None
    assert config.critic.path is not None
    batch = first_mini_batch(config, trainer, batch)
    try:
        expected = expected_critic(Path(config.critic.path), getattr(torch, config.model.dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    plan, directory = plan_of(trainer, config), Path(config.trainer.output_dir)
    found, _ = computed_gradients(trainer, plan, expected.batch, directory, VALUE_LOSS, model="critic")
    reasons = {"unknown to Hugging Face's model": len(found.keys() - expected.gradients.keys())}
    return compare_gradients(
        check, found, expected.gradients, dtype=config.model.dtype, skipped=reasons, what="parameters"
    )


def check_teacher(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the teacher's log-probs and entropies on the training ranks with those that transformers computes.

    Args:
        check: Name of the check.
        config: Configuration of the run, with its ``teacher``.
        trainer: Training ranks of the run.
        batch: Responses sampled from the policy, as a run sends to its teacher.

    Raises:
        EngineError: transformers cannot run the teacher.
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


def expected_scores(directory: Path, dtype: torch.dtype, batch: RaggedBatch) -> Tensor:
    """Compute scores with ``AutoModelForSequenceClassification``, sequence by sequence: float32 ``[B]``.

    Args:
        directory: Model directory of the reward model.
        dtype: Element type to which the weights are rounded before anything is computed with them, in float32.
        batch: B sequences.

    Raises:
        ResourceError: The host has not enough memory.
        EngineError: transformers cannot run the model.
        ConfigError: The model's config is malformed, or transformers does not know the model.
    """
    with computed_by_transformers(directory), torch.no_grad():
        model = load_model(directory, None, dtype, scores=True)
        sequences = batch.tokens.split(batch.lengths.tolist())
        return torch.cat([model(tokens[None], use_cache=False).logits[:, 0] for tokens in sequences])


def check_reward_model(check: str, config: RunConfig, ranks: RewardModelRanks, batch: RaggedBatch) -> Result:
    """Compare the scores that the reward model's ranks give to responses with those that transformers computes.

    Args:
        check: Name of the check.
        config: Configuration of the run, with its ``reward_model``.
        ranks: Ranks of the reward model.
        batch: Responses sampled from the policy, as a run sends to its reward model.

    Raises:
        EngineError: transformers cannot run the reward model.
    """
    assert config.reward_model is not None
    try:
        right = expected_scores(Path(config.reward_model.path), getattr(torch, config.model.dtype), batch)
    except ResourceError as error:
        return of_error(check, error, "skipped")
    found = ranks.scores(batch)
    detail = f"{len(right)} sequences, scores from {float(right.min()):.3g} to {float(right.max()):.3g}"
    return measured(check, largest(found - right), tolerance(config.model.dtype, right), detail)
