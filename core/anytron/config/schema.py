"""The schema of a run's YAML file: what is trained, and the file as a whole.

Where prompts come from is in :mod:`anytron.config.data`, how responses are made in :mod:`anytron.config.generation`,
how they are scored in :mod:`anytron.config.scoring`, how gradients are computed in :mod:`anytron.config.algorithm`; the
optimizer, the models beside the policy, and how the run is carried out in :mod:`anytron.config.running`. Every key is
documented there or here and nowhere else: ``docs/reference/config.md`` is generated from them.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from anytron.config.algorithm import AlgorithmSection
from anytron.config.data import DataSection  # noqa: TC001 - pydantic reads it
from anytron.config.generation import EnvironmentSection, RolloutSection
from anytron.config.running import (
    CheckpointSection,
    CriticSection,
    EngineSection,
    ExecutorSection,
    OptimizerSection,
    ParallelSection,
    PlatformSection,
    RewardModelSection,
    TeacherSection,
    TrackingSection,
    TrainerSection,
)
from anytron.config.scoring import REWARD_MODEL, RewardSection, ValidationSection
from anytron.config.section import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

ModelPart = Literal["vision_tower", "aligner", "language_model"]


class LoraSection(Section):
    """Train low-rank adapters (LoRA) and leave the model's own weights as they are; null = train all weights."""

    rank: int = Field(16, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(32.0, gt=0.0)
    """An adapter's output is multiplied by ``alpha / rank``."""
    rank_stabilized: bool = False
    """Multiply by ``alpha / sqrt(rank)`` instead (rsLoRA)."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of an adapter's inputs that is dropped in training."""
    targets: list[str] = Field(["all-linear"], min_length=1)
    """Layers that get an adapter, by Megatron's names (``linear_qkv``, ``mlp.linear_fc1``, ...), or ``all-linear``;
    the page docs/how-to/train-with-lora.md has the list."""
    path: str | None = None
    """Directory of an adapter in PEFT's format to start from; relative paths are relative to the YAML file."""

    @property
    def scaling(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class ModelSection(Section):
    """Which model is trained."""

    path: str | None = None
    """Directory of a Hugging Face model with weights; relative paths are relative to the YAML file."""
    config: dict[str, Any] | None = None
    """Instead of ``path``: a Hugging Face config (with ``model_type``); weights are random."""
    tokenizer: str | None = None
    """Directory of a tokenizer, or ``module:function`` / ``file.py:function`` that returns one.
    Default: the one in ``path``."""
    processor: str | None = None
    """Directory of a vision-language model's image processor (``preprocessor_config.json``), or
    ``module:function`` / ``file.py:function`` that returns one. Default: the one in ``path``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of parameters and activations. With bfloat16 the optimizer keeps float32 copies."""
    freeze: list[ModelPart] = Field(default_factory=list)
    """Parts of a vision-language model that are not trained: ``vision_tower`` (without its last layers),
    ``aligner`` (its last layers, which turn patches into embeddings of the language model), ``language_model``."""
    lora: LoraSection | None = None
    """Train adapters only; keys below."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path and model.config")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config needs model_type, for example qwen3")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model.config has no tokenizer: set model.tokenizer")
        return self


class RunConfig(Section):
    """The configuration of a whole run."""

    model: ModelSection
    data: DataSection
    rewards: list[RewardSection] = Field(default_factory=list)
    validation: ValidationSection | None = None
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    critic: CriticSection | None = None
    teacher: TeacherSection | None = None
    reward_model: RewardModelSection | None = None
    parallel: ParallelSection = ParallelSection()
    engine: EngineSection = EngineSection()
    executor: ExecutorSection = ExecutorSection()
    platform: PlatformSection = PlatformSection()
    trainer: TrainerSection = TrainerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: str = Field("never", min_length=1)
    """``never`` starts a new run; ``auto`` continues the run in ``trainer.output_dir`` from its newest checkpoint, or
    starts a new run if the directory is empty; the path of a checkpoint, relative to the current directory, starts a
    new run from that checkpoint. docs/how-to/resume-a-run.md says more."""
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _critic_where_it_is_used(self) -> RunConfig:
        advantage = self.algorithm.advantage
        if self.supervised:  # anytron.run.preflight.settings refuses a critic, as all else that has no meaning then
            return self
        if advantage == "gae" and self.critic is None:
            raise ValueError("algorithm.advantage=gae needs a critic: add a section critic, {} for the defaults")
        if advantage != "gae" and ":" not in advantage and self.critic is not None:
            raise ValueError(
                f"critic needs algorithm.advantage=gae, but algorithm.advantage is {advantage}: set "
                "algorithm.advantage=gae, or remove critic"
            )
        return self

    @model_validator(mode="after")
    def _teacher_where_it_is_used(self) -> RunConfig:
        if self.supervised:  # refused as a critic is
            return self
        advantage, coefficient = self.algorithm.advantage, self.algorithm.distillation_coefficient
        if coefficient > 0.0 and self.teacher is None:
            raise ValueError("algorithm.distillation_coefficient needs a teacher: add a section teacher with its path")
        if self.teacher is not None and coefficient == 0.0 and ":" not in advantage:
            other = "" if advantage == "none" else ", or remove the section teacher"
            raise ValueError(
                "teacher has no effect with algorithm.distillation_coefficient=0: set this key above 0 (1 is usual "
                f"with algorithm.advantage=none){other}"
            )
        if advantage == "none" and coefficient == 0.0:
            raise ValueError(
                "with algorithm.advantage=none rewards have no effect: add a section "
                "teacher and set algorithm.distillation_coefficient above 0, or set a different algorithm.advantage"
            )
        return self

    @model_validator(mode="after")
    def _rewards_where_they_teach(self) -> RunConfig:
        if self.supervised:
            return self
        if not self.rewards and self.algorithm.advantage != "none":
            raise ValueError(
                "rewards is required: a list of functions that score responses, [{function: exact_match}]; to "
                "learn from the responses of the data, set algorithm.name=sft, and from a teacher alone, "
                "algorithm.advantage=none"
            )
        examined = [] if self.validation is None else self.validation.sets
        for index, one in enumerate(examined):
            if not self.rewards and not one.rewards:
                raise ValueError(
                    f"validation.sets.{index} has no rewards, and there are no training rewards to use instead: add "
                    "rewards to this set"
                )
        return self

    @model_validator(mode="after")
    def _kl_where_it_is_used(self) -> RunConfig:
        algorithm = self.algorithm
        if algorithm.kl_coefficient == 0.0 and (algorithm.kl_target is not None or algorithm.kl_placement == "reward"):
            key = "kl_placement=reward" if algorithm.kl_target is None else "kl_target"
            raise ValueError(
                f"algorithm.{key} needs algorithm.kl_coefficient above 0: set algorithm.kl_coefficient (0.001 to 0.1 "
                "is usual)"
            )
        if algorithm.importance_floor > algorithm.importance_cap:
            raise ValueError(
                f"algorithm.importance_floor={algorithm.importance_floor:g} is above "
                f"algorithm.importance_cap={algorithm.importance_cap:g}, so that every token would be masked: set a "
                "floor below the cap"
            )
        return self

    @model_validator(mode="after")
    def _sampling_of_groups(self) -> RunConfig:
        if self.supervised:  # refused as a critic is
            return self
        algorithm, limit = self.algorithm, self.rollout.max_new_tokens
        ours = ":" not in algorithm.advantage
        if algorithm.dynamic_sampling and ours and not algorithm.compares_a_group:
            raise ValueError(
                "algorithm.dynamic_sampling drops groups whose rewards are all equal, but "
                f"algorithm.advantage={algorithm.advantage} learns from them: remove algorithm.dynamic_sampling, or "
                f"set algorithm.advantage=grpo{'' if self.critic is None else ' and remove the section critic'}"
            )
        if algorithm.overlong_buffer is None:
            return self
        if self.environment is not None:
            raise ValueError(
                "algorithm.overlong_buffer cannot be used with an environment, where rollout.max_new_tokens limits "
                "each turn and not the response: remove algorithm.overlong_buffer"
            )
        if algorithm.overlong_buffer > limit:
            raise ValueError(
                f"algorithm.overlong_buffer={algorithm.overlong_buffer} is above rollout.max_new_tokens={limit}: lower "
                "algorithm.overlong_buffer"
            )
        return self

    @model_validator(mode="after")
    def _reward_of_an_environment_or_a_model(self) -> RunConfig:
        examined = [] if self.validation is None else self.validation.sets
        functions = {
            reward.function for rewards in (self.rewards, *(one.rewards for one in examined)) for reward in rewards
        }
        if self.environment is None and "environment" in functions:
            raise ValueError(
                "the reward function 'environment' returns the rewards of an environment, but there is no environment: "
                "add a section environment"
            )
        if self.reward_model is None and REWARD_MODEL in functions:
            raise ValueError(
                "the reward function 'reward_model' needs a reward model: add a section reward_model with its path"
            )
        if self.reward_model is not None and REWARD_MODEL not in functions and not self.supervised:
            raise ValueError(
                "the section reward_model is not used: add {function: reward_model} to rewards, or remove the section"
            )
        return self

    @model_validator(mode="after")
    def _steps_ahead(self) -> RunConfig:
        staleness, continues = self.rollout.max_staleness, self.rollout.continue_over_updates
        if staleness > 1 and not continues:
            raise ValueError(
                f"rollout.max_staleness={staleness} needs rollout.continue_over_updates=true: otherwise every "
                "unfinished response is completed before each update, and 1 has the same effect"
            )
        if continues and not staleness:
            raise ValueError("rollout.continue_over_updates needs rollout.max_staleness=1 or more")
        if staleness and (self.rollout.sleep or self.engine.offload):
            raise ValueError(
                "rollout.sleep and engine.offload need generation and training to take turns, but with "
                f"rollout.max_staleness={staleness} both work at the same time: remove both keys"
            )
        if staleness and self.engine.on_policy == "bitwise":
            raise ValueError(
                "engine.on_policy=bitwise compares log-probs of the same weights, but with "
                f"rollout.max_staleness={staleness} rollouts use older weights: remove one of the two keys"
            )
        if staleness and self.trainer.rollout_log_prob_tolerance is not None:
            raise ValueError(
                "trainer.rollout_log_prob_tolerance compares log-probs of the same weights, but with "
                f"rollout.max_staleness={staleness} rollouts use older weights: remove one of the two keys"
            )
        return self

    @model_validator(mode="after")
    def _measured_criterion(self) -> RunConfig:
        metric = None if self.validation is None else self.validation.metric
        if metric is not None and metric.endswith("/loss") != self.supervised:
            measured = f"algorithm.name={self.algorithm.name} measures {'losses' if self.supervised else 'rewards'}"
            raise ValueError(
                f"validation.metric is {metric}, but {measured}: remove it to use the metric of the first set"
            )
        return self

    @model_validator(mode="after")
    def _best_is_kept(self) -> RunConfig:
        if self.validation is not None and self.validation.keep_best and not self.checkpoint.keep:
            raise ValueError(
                "validation.keep_best needs checkpoints, but with checkpoint.keep=0 no checkpoint is written: set "
                "checkpoint.keep to 1 or more"
            )
        return self

    @property
    def supervised(self) -> bool:
        """Whether the run learns from responses in the data: nothing is generated and nothing is rewarded."""
        return self.algorithm.name == "sft"

    @property
    def group_size(self) -> int:
        """Number of responses to each prompt of a step; 1 in supervised fine-tuning."""
        return 1 if self.supervised else self.rollout.samples_per_prompt

    @property
    def longest_response(self) -> int:
        """Largest number of tokens of a response in training and validation; with an environment, of a turn."""
        examined = [] if self.validation is None else self.validation.sets
        return max([self.rollout.max_new_tokens, *(one.max_new_tokens or 0 for one in examined)])

    @property
    def corrected_algorithm(self) -> AlgorithmSection:
        """Section ``algorithm`` with ``importance_correction=auto`` replaced by the value that applies."""
        other_policy = self.rollout.max_staleness or self.rollout.quantization
        if self.algorithm.importance_correction != "auto" or not other_policy:
            return self.algorithm
        return self.algorithm.model_copy(update={"importance_correction": "truncated"})

    @property
    def of_reward_model(self) -> RunConfig:
        """The configuration for the reward model's ranks: its path and parallel sizes instead of the policy's."""
        assert self.reward_model is not None
        tokens = self.reward_model.max_tokens_per_micro_batch
        engine = {"max_tokens_per_micro_batch": tokens, "offload": [], "recompute": "none"}
        return self.model_copy(
            update={
                "model": ModelSection(path=self.reward_model.path, dtype=self.model.dtype),
                "parallel": self.reward_model.parallel,
                "engine": self.engine.model_copy(update=engine),
                "algorithm": AlgorithmSection(),  # without the other models
                "critic": None,
                "teacher": None,
            }
        )

    @property
    def policy_steps(self) -> int:
        """Training steps in which the policy is updated: all but the critic's warm-up."""
        return self.trainer.total_steps - (0 if self.critic is None else self.critic.warmup_steps)


def default_run(sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> RunConfig:
    """A configuration for processes that belong to no run, such as those of the conformance kit.

    Every key has its default. Model, data and rewards, which a run must name, have placeholders.

    Args:
        sections: Values to set, by section and key.
    """
    needed: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"source": "jsonl"},
        "rewards": [{"function": "exact_match"}],
    }
    known = {name: {**needed.get(name, {}), **section} for name, section in sections.items()}
    return RunConfig.model_validate({**needed, **known})
