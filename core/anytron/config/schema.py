"""The schema of a run's YAML file: what is trained, and the file as a whole.

Where prompts come from is in :mod:`anytron.config.data`, how responses are made in :mod:`anytron.config.generation`,
what they teach in :mod:`anytron.config.algorithm`, the optimizer and the models beside the policy in
:mod:`anytron.config.roles`, how the run is carried out in :mod:`anytron.config.running`. Every key is documented there
or here and nowhere else: ``docs/reference/config.md`` is generated from them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from anytron.config.algorithm import AlgorithmSection
from anytron.config.data import DataSection
from anytron.config.generation import EnvironmentSection, RolloutSection
from anytron.config.roles import CriticSection, OptimizerSection, TeacherSection
from anytron.config.running import (
    CheckpointSection,
    EngineSection,
    ExecutorSection,
    ParallelSection,
    PlatformSection,
    TrackingSection,
    TrainerSection,
)
from anytron.config.section import Section
from anytron.errors import did_you_mean

ModelPart = Literal["vision_tower", "aligner", "language_model"]
Direction = Literal["max", "min"]


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
    ``aligner`` (those layers, which make text tokens of image patches), ``language_model``."""
    lora: LoraSection | None = None
    """Train adapters only; keys below."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path and model.config")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config needs model_type, for example qwen3")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model.config comes without a tokenizer: set model.tokenizer")
        return self


class RewardSection(Section):
    """One reward function; the rewards of several are added with their weights.

    At least one is required, and none is with ``algorithm.name=sft`` or ``algorithm.advantage=none``.
    """

    function: str
    """A registered reward (``exact_match``, ``contains``, ``regex``, ``format``, ``math``, ``code``, ``judge``,
    ``reasoning_gym``, ``environment``), or ``module:function`` / ``file.py:function``; a class will do as well."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """What its metrics and its log are called; default: the function's name. Two rewards need two names."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class; docs/how-to/write-a-reward.md has those of registered
    rewards."""
    processes: int = Field(1, ge=1)
    """Processes that call the function; the samples of one prompt are in one call, whatever their number."""
    timeout_s: float = Field(120.0, gt=0.0)
    """Seconds from when the function takes a sample from its list until it takes the next one, or returns. One that
    takes all of them first and then works, as one that asks a judge does, has this long for all of the work. A call
    with N samples ends after N + 1 times as long at the latest, however often the function takes them."""
    memory_gib: float | None = Field(None, gt=0.0)
    """Memory that a process may allocate, in GiB; null = no limit."""
    on_error: Literal["drop", "zero", "stop"] = "drop"
    """What becomes of a sample for which the function raises, hangs, ends its process or gives no finite number:
    ``drop`` leaves it out of the update and out of its group's mean and deviation, ``zero`` gives it the reward 0
    (which may be more than others get), ``stop`` ends the run. A function that fails for every sample of a step ends
    the run always."""


class ValidationSetSection(Section):
    """Prompts on which the policy is examined, how it answers them, and what a good answer is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Its metrics are called ``validation/NAME/...``."""
    data: DataSection
    """As section ``data``; every prompt is taken once, in the source's order: leave out ``prompts_per_step`` and
    ``shuffle``."""
    rewards: list[RewardSection] = Field(default_factory=list)
    """As section ``rewards``; empty = the rewards of training. The functions run in processes of their own. With
    ``algorithm.name=sft`` a set has neither these nor the keys below: what is measured is the loss of its responses."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt: the n of ``mean@n``."""
    pass_at: list[int] = Field(default_factory=lambda: [1])
    """For each k in it, the probability that at least one of k responses passes: ``pass@k``."""
    pass_threshold: float = 1.0
    """A response passes whose reward is at least this."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response, in tokens; with an ``environment``, longest turn. Default: that of ``rollout``, as for the
    keys below."""
    temperature: float | None = Field(None, gt=0.0)
    """Sampling temperature."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Nucleus sampling; 1 = off."""
    top_k: int | None = Field(None, ge=0)
    """Sample among the k most probable tokens; 0 = off, 1 = take the most probable one (greedy)."""

    @property
    def mean_metric(self) -> str:
        """Name of the metric that every set has: the mean reward."""
        return f"validation/{self.name}/mean@{self.samples_per_prompt}"

    def pass_metric(self, k: int) -> str:
        """Name of the metric of an entry of ``pass_at``."""
        return f"validation/{self.name}/pass@{k}"

    @property
    def loss_metric(self) -> str:
        """Name of the metric that every set has in supervised fine-tuning."""
        return f"validation/{self.name}/loss"

    @model_validator(mode="after")
    def _possible(self) -> ValidationSetSection:
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if wrong or len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(
                f"pass_at={self.pass_at}: different numbers from 1 to samples_per_prompt={self.samples_per_prompt} are "
                "possible, because pass@k cannot be estimated from fewer than k responses"
            )
        if not self.data.shuffle or self.data.prompts_per_step != DataSection.model_fields["prompts_per_step"].default:
            raise ValueError("validation takes every prompt in order: remove data.prompts_per_step and data.shuffle")
        return self


class ValidationSection(Section):
    """Examine the policy after the last step, and when these keys say so, on prompts from which nothing is learnt."""

    sets: list[ValidationSetSection] = Field(min_length=1)
    """The sets of prompts; keys below."""
    every_steps: int | None = Field(None, ge=1)
    """Examine after every so many steps."""
    before_training: bool = False
    """Examine before the first step."""
    metric: str | None = None
    """The number that says which policy is best: ``validation/NAME/mean@n``, or ``pass@k`` of a set; with
    ``algorithm.name=sft`` its ``loss``. Default: the mean, or the loss, of the first set."""
    direction: Direction | None = None
    """Whether the highest or the lowest ``metric`` is best. Default: the lowest loss, the highest of all others."""
    keep_best: bool = False
    """Save a checkpoint when ``metric`` is better than in all validations before, and keep it beside the newest ones;
    ``checkpoints/best`` names it."""
    patience: int | None = Field(None, ge=1)
    """End the run after so many validations in a row in which ``metric`` did not become better; null = never."""
    min_delta: float = Field(0.0, ge=0.0)
    """``patience``: what counts as better is better by more than this."""

    def criterion(self, *, supervised: bool) -> tuple[str, Direction]:
        """``metric`` and ``direction``, or their defaults."""
        default = self.sets[0].loss_metric if supervised else self.sets[0].mean_metric
        return self.metric or default, self.direction or ("min" if supervised else "max")

    @model_validator(mode="after")
    def _possible(self) -> ValidationSection:
        names = [one.name for one in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have the same name: {', '.join(names)}")
        known = [name for one in self.sets for name in (one.mean_metric, *map(one.pass_metric, one.pass_at))]
        known += [one.loss_metric for one in self.sets]
        if self.metric is not None and self.metric not in known:
            hint = did_you_mean(self.metric, known)
            raise ValueError(f"unknown metric {self.metric}; {hint or 'there are ' + ', '.join(known)}")
        if self.every_steps is None and (self.keep_best or self.patience):
            raise ValueError(
                "keep_best and patience compare validations, and there is only the last one: set every_steps"
            )
        return self


class RunConfig(Section):
    """A whole run."""

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
    parallel: ParallelSection = ParallelSection()
    engine: EngineSection = EngineSection()
    executor: ExecutorSection = ExecutorSection()
    platform: PlatformSection = PlatformSection()
    trainer: TrainerSection = TrainerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: str = Field("never", min_length=1)
    """``never`` starts a new run; ``auto`` continues the one in ``trainer.output_dir`` from its newest checkpoint, and
    starts a new one in an empty directory; the directory of a checkpoint, relative to the current directory, starts a
    new run from that. docs/how-to/resume-a-run.md says more."""
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _critic_where_it_is_used(self) -> RunConfig:
        advantage = self.algorithm.advantage
        if self.supervised:  # anytron.preflight.supervised refuses a critic, as all else that has no meaning then
            return self
        if advantage == "gae" and self.critic is None:
            raise ValueError("algorithm.advantage=gae needs a critic: add a section critic, {} for the defaults")
        if advantage != "gae" and ":" not in advantage and self.critic is not None:
            raise ValueError(
                f"a critic is for algorithm.advantage=gae, and it is {advantage}: set that, or remove critic"
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
            raise ValueError(
                "a teacher teaches nothing with algorithm.distillation_coefficient=0: set it, 1 is usual with "
                "algorithm.advantage=none, or remove teacher"
            )
        if advantage == "none" and coefficient == 0.0:
            raise ValueError(
                "with algorithm.advantage=none rewards teach nothing: set a teacher and "
                "algorithm.distillation_coefficient, or another algorithm.advantage"
            )
        return self

    @model_validator(mode="after")
    def _rewards_where_they_teach(self) -> RunConfig:
        if self.supervised:
            return self
        if not self.rewards and self.algorithm.advantage != "none":
            raise ValueError(
                "rewards is required: a list of functions that say how good a response is, [{function: exact_match}]; "
                "to learn from the responses of the data, set algorithm.name=sft, and from a teacher alone, "
                "algorithm.advantage=none"
            )
        examined = [] if self.validation is None else self.validation.sets
        for index, one in enumerate(examined):
            if not self.rewards and not one.rewards:
                raise ValueError(f"validation.sets.{index} has no rewards, and training has none that it could use")
        return self

    @model_validator(mode="after")
    def _kl_where_it_is_used(self) -> RunConfig:
        algorithm = self.algorithm
        if algorithm.kl_coefficient == 0.0 and (algorithm.kl_target is not None or algorithm.kl_placement == "reward"):
            key = "kl_placement=reward" if algorithm.kl_target is None else "kl_target"
            raise ValueError(
                f"algorithm.{key} needs algorithm.kl_coefficient above 0, with which the run begins: set it, 0.001 to "
                "0.1 is usual"
            )
        if algorithm.importance_floor > algorithm.importance_cap:
            raise ValueError(
                f"algorithm.importance_floor={algorithm.importance_floor:g} is above algorithm.importance_cap="
                f"{algorithm.importance_cap:g}: no factor would be kept"
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
                "algorithm.dynamic_sampling leaves out groups whose rewards are all equal, and with "
                f"algorithm.advantage={algorithm.advantage} these teach something: take grpo, or leave it out"
            )
        if algorithm.overlong_buffer is None:
            return self
        if self.environment is not None:
            raise ValueError(
                "algorithm.overlong_buffer lies before the longest possible response, and with an environment "
                "rollout.max_new_tokens is the limit of a turn: leave it out"
            )
        if algorithm.overlong_buffer > limit:
            raise ValueError(
                f"algorithm.overlong_buffer={algorithm.overlong_buffer} is more than rollout.max_new_tokens={limit}: "
                "it lies before that limit"
            )
        return self

    @model_validator(mode="after")
    def _reward_of_an_environment(self) -> RunConfig:
        examined = [] if self.validation is None else self.validation.sets
        rewards = [*self.rewards, *(reward for one in examined for reward in one.rewards)]
        if self.environment is None and any(reward.function == "environment" for reward in rewards):
            raise ValueError("the reward environment is what an environment gives: add a section environment")
        return self

    @model_validator(mode="after")
    def _steps_ahead(self) -> RunConfig:
        staleness, continues = self.rollout.max_staleness, self.rollout.continue_over_updates
        if staleness > 1 and not continues:
            raise ValueError(
                f"rollout.max_staleness={staleness} needs rollout.continue_over_updates=true: otherwise all responses "
                "under way are finished before each update, and 1 gives as much"
            )
        if continues and not staleness:
            raise ValueError("rollout.continue_over_updates needs rollout.max_staleness=1 or more")
        if staleness and (self.rollout.sleep or self.engine.offload):
            raise ValueError(
                "rollout.sleep and engine.offload leave the device while the other side works, and with "
                f"rollout.max_staleness={staleness} both work at the same time: leave them out"
            )
        if staleness and self.trainer.rollout_log_prob_tolerance is not None:
            raise ValueError(
                "trainer.rollout_log_prob_tolerance compares log-probs of the same weights, and with "
                f"rollout.max_staleness={staleness} rollouts have older ones: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _measured_criterion(self) -> RunConfig:
        metric = None if self.validation is None else self.validation.metric
        if metric is not None and metric.endswith("/loss") != self.supervised:
            measured = f"algorithm.name={self.algorithm.name} measures {'losses' if self.supervised else 'rewards'}"
            raise ValueError(f"validation.metric is {metric}, and {measured}: leave it out for that of the first set")
        return self

    @model_validator(mode="after")
    def _best_is_kept(self) -> RunConfig:
        if self.validation is not None and self.validation.keep_best and not self.checkpoint.keep:
            raise ValueError("validation.keep_best keeps a checkpoint, and checkpoint.keep=0 says that none is written")
        return self

    @property
    def supervised(self) -> bool:
        """Whether the data have the responses that are learnt, so that nothing is generated and nothing rewarded."""
        return self.algorithm.name == "sft"

    @property
    def group_size(self) -> int:
        """Sequences of a step that come from one prompt."""
        return 1 if self.supervised else self.rollout.samples_per_prompt

    @property
    def longest_response(self) -> int:
        """Tokens that a response may have, in training or in validation; with an environment, a turn."""
        examined = [] if self.validation is None else self.validation.sets
        return max([self.rollout.max_new_tokens, *(one.max_new_tokens or 0 for one in examined)])

    @property
    def corrected_algorithm(self) -> AlgorithmSection:
        """Section ``algorithm`` with ``importance_correction`` decided."""
        if self.algorithm.importance_correction != "auto" or not self.rollout.max_staleness:
            return self.algorithm
        return self.algorithm.model_copy(update={"importance_correction": "truncated"})

    @property
    def policy_steps(self) -> int:
        """Training steps in which the policy is updated: all but the critic's warm-up."""
        return self.trainer.total_steps - (0 if self.critic is None else self.critic.warmup_steps)
