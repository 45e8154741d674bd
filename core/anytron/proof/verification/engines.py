"""The engines and trajectories that the checks share, and the values that the engines compute from them.

An engine that a check has ended is started again for the next check, if possible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.advantages import broadcast_to_tokens
from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.components import TRAINING_ENGINES
from anytron.base.errors import AnytronError, EngineError
from anytron.base.files import WEIGHTS, PrivateDirectory
from anytron.base.seeds import derive_seed
from anytron.proof.checks import Inapplicable
from anytron.run.preflight.capabilities import compares_weights
from anytron.run.rollout.turns import SingleTurns
from anytron.run.trainer.experience import assemble, make_samples
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.weight_transfer import WeightTransfer
from anytron.run.trainer.workers import TrainingWorkers, kernel_suppliers, start_workers
from anytron.workers.engines.rollout_engine import PromptInputs
from anytron.workers.executor.protocol import GroupSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.trainer.reward_model import RewardModelRanks
    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.rewards.sample import Sample
    from anytron.workers.engines.rollout_engine import SamplingParams
    from anytron.workers.executor.protocol import Executor


_OUT_OF_MEMORY = ("out of memory", "OutOfMemory")


class Engines:
    """The training engine, the rollout engine and the reward model.

    Args:
        config: Configuration of the run.
        executor: Starts the engines' processes; the constructor waits for the training ranks.

    Attributes:
        kernels: Plugins that supplied each kernel of the configured training engine, by the kernel's name.
    """

    _trainer: TrainingWorkers
    _rollout: RolloutPool
    _reward_model: RewardModelRanks | None
    _built: RunConfig | None  # what the training engine was built with; None once its weights have changed
    _has_weights: bool  # the rollout engine

    def __init__(self, config: RunConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._failure: AnytronError | None = None  # of a start
        self._start()
        self.kernels = kernel_suppliers(self._trainer.describe())

    def trainer(self, config: RunConfig | None = None) -> TrainingWorkers:
        """The training ranks, with the weights that the run begins with.

        Args:
            config: Another configuration with the same number of ranks; None = the run's.
        """
        config = self._config if config is None else config
        self._start_if_ended()
        if self._built != config:
            self._built = None
            self._trainer.group.rebuild(config)
            self._trainer = TrainingWorkers.of(self._trainer.group)
            self._built = config
        return self._trainer

    def trainer_to_update(self, config: RunConfig | None = None) -> TrainingWorkers:
        """The training ranks, for a check that changes the weights: the next check gets new ranks."""
        trainer = self.trainer(config)
        self._built = None
        return trainer

    def rollout(self, trainer: TrainingWorkers | None = None) -> RolloutPool:
        """The rollout engine, with the training engine's weights.

        Args:
            trainer: Training ranks whose weights have changed; the next check gets the first weights again. None = the
                weights that the run begins with.

        Raises:
            TransferError: The rollout engine holds different weights.
        """
        self._start_if_ended()
        if trainer is not None or not self._has_weights:
            self.give_weights(trainer)
        return self._rollout

    def reward_model(self) -> RewardModelRanks:
        """The ranks of the run's reward model."""
        self._start_if_ended()
        assert self._reward_model is not None
        return self._reward_model

    def give_weights(self, trainer: TrainingWorkers | None = None) -> None:
        """Load weights (:meth:`rollout`) into the rollout engine; if it can return its weights, compare them.

        Raises:
            TransferError: The rollout engine holds different weights.
        """
        changed, trainer = trainer is not None, trainer or self.trainer()
        with PrivateDirectory(WEIGHTS) as exchange:
            transfer = WeightTransfer.from_config(self._config, self._executor, exchange.path, lambda _: None)
            self._rollout.load_weights(transfer.of(trainer, compared=compares_weights(self._config)))
        self._has_weights = not changed

    def close(self) -> None:
        """Close all engines and end their processes, to free the memory for another check."""
        self._executor.close()

    def _start(self) -> None:
        self._trainer, self._rollout, self._reward_model = start_workers(self._executor, self._config)
        self._built, self._has_weights = self._config, False

    def _start_if_ended(self) -> None:
        if self._failure is not None:
            raise self._failure
        judge = self._reward_model
        if self._trainer.group.ended or self._rollout.failed or (judge is not None and judge.group.ended):
            self._executor.end()
            try:
                self._start()
            except AnytronError as error:
                self._failure = error
                raise


WHOLE_LOGITS = 4
"""Number of sequences whose whole logits, and whose gradients, are compared: more would take too much memory."""
OTHER_TEMPERATURE = 0.7
"""Log-probs and entropies are also compared at this temperature: at 1 a missing division would not show."""

VALUE_LOSS = ValueLoss()
"""The critic's loss."""
_VALUES_BEFORE = torch.tensor([0.8, -0.2, 0.3, -0.9])
"""Values before the update, less those now, in turn: within and beyond what the loss lets a value move."""
_RETURNS = torch.tensor([1.0, -1.5, 0.6])
"""Returns, less the values now."""


@dataclass(frozen=True)
class Forward:
    """Results of an engine's forward passes before any update.

    Attributes:
        logits: float32 ``[T', V]`` of the first sequences.
        by_temperature: Log-probs and entropies of all sequences, float32 ``[T]``, at each of :func:`temperatures`.
    """

    logits: Tensor
    by_temperature: dict[float, TokenOutputs]


@dataclass(frozen=True)
class Observation:
    """Values that an engine computes in one layout, to be compared with those of another layout.

    Attributes:
        outputs: ``log-probs``, and ``values`` if the run has a critic: float32 ``[T]`` of all sequences, before any
            update.
        grad_norms: L2 norms of the gradients in one update on all sequences, before clipping: the policy's, and the
            critic's if the run has one.
    """

    outputs: Mapping[str, Tensor]
    grad_norms: Mapping[str, float]


def temperatures(config: RunConfig) -> tuple[float, ...]:
    """Return the run's temperature and :data:`OTHER_TEMPERATURE`, without duplicates."""
    return tuple(dict.fromkeys((config.rollout.temperature, OTHER_TEMPERATURE)))


def gradient_temperature(config: RunConfig) -> float:
    """The run's temperature, or another one if it is 1: at 1, a missing division by the temperature would not show."""
    own = config.rollout.temperature
    return OTHER_TEMPERATURE if own == 1.0 else own


def plan_of(trainer: TrainingWorkers, config: RunConfig) -> UpdatePlan:
    """Plan one update on a whole batch, with the run's limits of micro-batches."""
    plan = UpdatePlan.from_config(config, trainer.topology[0])
    return replace(plan, epochs=1, count=1)


def observe_forward(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch) -> Forward:
    """Compute logits, log-probs and entropies in forward passes of the training ranks."""
    return Forward(trainer.logits(first_sequences(batch)), observe_token_outputs(trainer, config, batch))


def observe_token_outputs(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch) -> dict[float, TokenOutputs]:
    """Let the training ranks compute log-probs and entropies, float32 ``[T]``, at each of :func:`temperatures`."""
    plan = plan_of(trainer, config)
    return {
        temperature: trainer.token_outputs(replace(batch, temperature=temperature), plan, "policy")
        for temperature in temperatures(config)
    }


def observe(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch) -> Observation:
    """Compute log-probs and values, and do one update of each model, which changes the weights.

    Raises:
        EngineError: A loss or a gradient is not finite.
    """
    plan = plan_of(trainer, config)
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    loss = PolicyLoss(config.algorithm)
    batch = batch.scored(scored)
    if config.algorithm.kl_coefficient > 0.0:
        batch = replace(batch, reference_log_probs=trainer.score(batch, plan, "reference"))
    outputs = {"log-probs": scored.log_probs}
    if config.critic is not None:
        values = trainer.with_values(batch, plan).values
        assert values is not None, "the ranks compute them"
        outputs["values"], batch = values, off_value(batch, values)
    mini_batch = next(plan.mini_batches(batch, config.trainer.seed))
    metrics = trainer.update(mini_batch, plan, loss)
    _require_update(metrics, "update", "", "loss/total")
    grad_norms = {"gradient": metrics["grad_norm"]}
    if config.critic is not None:
        metrics = trainer.update_critic(mini_batch, plan, VALUE_LOSS)
        _require_update(metrics, "update_critic", "critic/", "critic/loss")
        grad_norms["critic's gradient"] = metrics["critic/grad_norm"]
    return Observation(outputs, grad_norms)


def observe_on_one_rank(config: RunConfig, executor: Executor, batch: RaggedBatch) -> Observation:
    """Observe one rank that holds the whole model, in a process that ends afterwards.

    Args:
        config: Configuration with one training rank.
        executor: An executor that has started nothing.
        batch: Sampled responses.

    Raises:
        Inapplicable: One rank has too little memory.
        EngineError: A loss or a gradient is not finite.
    """
    try:
        with executor:
            group = executor.start(GroupSpec("trainer", TRAINING_ENGINES, config.engine.name, 1))
            return observe(TrainingWorkers.of(group), config, batch)
    except AnytronError as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            raise Inapplicable("one rank cannot hold the model") from error
        raise


def _require_update(metrics: Mapping[str, float], where: str, prefix: str, loss: str) -> None:
    if metrics[f"{prefix}update/skipped"]:
        raise EngineError(
            "The loss or a gradient is not finite.",
            where=where,
            why=f"the loss is {metrics[loss]:.4g}, the gradient norm is {metrics[f'{prefix}grad_norm']:.4g}",
            fix="verify with model.dtype=float32: if that passes, the dtype is too narrow; else check the weights",
        )


def off_value(batch: RaggedBatch, values: Tensor) -> RaggedBatch:
    """Return the batch with old values and returns that differ slightly from a critic's ``values``, float32 ``[T]``."""
    places = torch.arange(batch.num_tokens)
    before, returns = (values + offset[places % len(offset)] for offset in (_VALUES_BEFORE, _RETURNS))
    return replace(batch, values=before, returns=returns)


def first_mini_batch(config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> RaggedBatch:
    """Take the first sequences as a mini-batch, at least one for each data-parallel replica."""
    plan = plan_of(trainer, config)
    return next(plan.mini_batches(first_sequences(batch, trainer.dp_size), config.trainer.seed)).batch


def first_sequences(batch: RaggedBatch, at_least: int = 1) -> RaggedBatch:
    """Take the first :data:`WHOLE_LOGITS` sequences, or the first ``at_least`` if that is more."""
    return batch.select(torch.arange(min(max(WHOLE_LOGITS, at_least), batch.num_sequences)))


PROMPTS = 4
SAMPLES = 2
MAX_NEW_TOKENS = 32
"""Largest length of a response: every kind of position occurs in it, and sampling takes only seconds."""


@dataclass(frozen=True)
class Trajectories:
    """Sampled responses.

    Attributes:
        prompts: The prompts.
        samples: The responses in the form in which reward functions get them.
        batch: The same responses as a training batch; advantages alternate in sign, so that gradients are far from
            zero.
        sequences: Prompt and response of each sample together, with its images.
    """

    prompts: list[TokenizedPrompt]
    samples: list[Sample]
    batch: RaggedBatch
    sequences: list[PromptInputs]


def draw_prompts(config: RunConfig, prepared: PreparedRun) -> list[TokenizedPrompt]:
    """Draw prompts, so many that every data-parallel replica gets its own sequences in every mini-batch."""
    replicas = config.parallel.data_parallel_size
    return prepared.draw(max(PROMPTS, -(-replicas * config.algorithm.mini_batches // SAMPLES)))


def limited(sampling: SamplingParams) -> SamplingParams:
    """Limit the length of responses to :data:`MAX_NEW_TOKENS`."""
    return replace(
        sampling,
        max_new_tokens=min(MAX_NEW_TOKENS, sampling.max_new_tokens),
        min_new_tokens=min(MAX_NEW_TOKENS, sampling.min_new_tokens),
    )


def sample_trajectories(
    config: RunConfig, prepared: PreparedRun, rollout: RolloutPool, prompts: list[TokenizedPrompt]
) -> Trajectories:
    """Sample responses to prompts with the current weights of the rollout engine."""
    turns = SingleTurns(rollout, limited(prepared.sampling))
    responses = turns.finish(turns.begin(prompts, SAMPLES, derive_seed(config.trainer.seed, "verify", 1)))
    samples = make_samples(prompts, responses, prepared.tokenizer)
    batch = assemble(samples, config.rollout.temperature, torch.arange(len(samples)) // SAMPLES)
    signs = torch.tensor([1.0 if index % 2 else -1.0 for index in range(len(samples))])
    advantages = broadcast_to_tokens(signs, batch.lengths, batch.response_mask)
    sequences = [
        PromptInputs((*sample.prompt_tokens, *sample.response_tokens), prompts[index // SAMPLES].patches)
        for index, sample in enumerate(samples)
    ]
    return Trajectories(prompts, samples, replace(batch, advantages=advantages), sequences)
