"""The schema of a run's YAML file: how responses are judged, in training and in validation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from anytron.base.errors import did_you_mean
from anytron.config.data import DataSection
from anytron.config.section import Section, refuse_zero

Direction = Literal["max", "min"]

REWARD_MODEL = "reward_model"
"""``rewards[].function`` for the model of section ``reward_model``, which is not a function in its own process."""


class RewardSection(Section):
    """One reward function; the rewards of several are added with their weights.

    At least one is required, except with ``algorithm.name=sft`` or ``algorithm.advantage=none``.
    """

    function: str
    """A registered reward (``exact_match``, ``contains``, ``regex``, ``format``, ``math``, ``code``, ``judge``,
    ``reasoning_gym``, ``environment``, ``reward_model``), or ``module:function`` / ``file.py:function``; or a class."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name of the reward in metrics and in the name of its log; default: the function's name. No two rewards may have
    the same name."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class; docs/how-to/write-a-reward.md lists the options of registered
    rewards."""
    processes: int = Field(1, ge=1)
    """Processes that call the function. All samples of a prompt are in one call, however many processes there are."""
    timeout_s: float = Field(120.0, gt=0.0)
    """Seconds from when the function takes a sample from its list until it takes the next sample, or returns. A
    function that first takes all samples has this time for all of its work; ``judge`` takes each sample again while it
    waits for the answer. A call with N samples may last at most N + 1 times as long, however often the function takes
    samples."""
    memory_gib: float | None = Field(None, gt=0.0)
    """Memory that a process may allocate, in GiB; null = no limit."""
    on_error: Literal["drop", "zero", "stop"] = "drop"
    """What happens to a sample for which the function raises, hangs, ends its process or returns no finite number:
    ``drop`` leaves it out of the update and out of its group's mean and deviation, ``zero`` gives it the reward 0
    (which may be more than others get), ``stop`` ends the run. A function that fails for every sample of a step ends
    the run always."""

    @model_validator(mode="after")
    def _possible(self) -> RewardSection:
        if self.function == REWARD_MODEL:
            for name in ("options", "processes", "timeout_s", "memory_gib"):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(
                        f"{name} applies to reward functions only: remove it; the section {REWARD_MODEL} has the keys "
                        "of the reward model"
                    )
        return self


class ValidationSetSection(Section):
    """Prompts to evaluate the policy on, how it answers them, and how answers are scored."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Its metrics are called ``validation/NAME/...``."""
    data: DataSection
    """As section ``data``; every prompt is taken once, in the source's order, without ``prompts_per_step`` and
    ``shuffle``."""
    rewards: list[RewardSection] = Field(default_factory=list)
    """As section ``rewards``; empty = the rewards of training. The functions run in separate processes. With
    ``algorithm.name=sft`` a set has neither rewards nor the keys below: the loss of its responses is measured."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt: the n of ``mean@n``."""
    pass_at: list[int] = Field(default_factory=lambda: [1])
    """Numbers k for which ``pass@k`` is measured: the probability that at least one of k responses passes."""
    pass_threshold: float = 1.0
    """A response passes if its reward is at least this."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response, in tokens; with an ``environment``, longest turn. Default: the value in ``rollout``, as for the
    keys below."""
    temperature: float | None = Field(None, gt=0.0)
    """Sampling temperature."""
    _no_zero = field_validator("temperature", mode="before")(refuse_zero)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Nucleus sampling; 1 = off."""
    top_k: int | None = Field(None, ge=0)
    """Sample among the k most probable tokens; 0 = off, 1 = take the most probable one (greedy)."""

    @property
    def title(self) -> str:
        """Name of the set in messages: ``validation set NAME``."""
        return f"validation set {self.name}"

    @property
    def mean_metric(self) -> str:
        """Name of the metric that every set has in reinforcement learning: the mean reward."""
        return f"validation/{self.name}/mean@{self.samples_per_prompt}"

    def pass_metric(self, k: int) -> str:
        """Name of the metric pass@k, for an entry k of ``pass_at``."""
        return f"validation/{self.name}/pass@{k}"

    @property
    def loss_metric(self) -> str:
        """Name of the metric that every set has in supervised fine-tuning: the loss."""
        return f"validation/{self.name}/loss"

    @model_validator(mode="after")
    def _possible(self) -> ValidationSetSection:
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if wrong or len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(
                f"pass_at={self.pass_at}: give different numbers from 1 to "
                f"samples_per_prompt={self.samples_per_prompt}, because pass@k cannot be estimated from fewer than "
                "k responses"
            )
        if not self.data.shuffle or self.data.prompts_per_step != DataSection.model_fields["prompts_per_step"].default:
            raise ValueError("validation takes every prompt in order: remove data.prompts_per_step and data.shuffle")
        return self


class ValidationSection(Section):
    """Evaluate the policy after the last step, and as often as these keys say, on prompts that are not trained on."""

    sets: list[ValidationSetSection] = Field(min_length=1)
    """The sets of prompts; keys below."""
    every_steps: int | None = Field(None, ge=1)
    """Validate after each step whose number is a multiple of this one."""
    before_training: bool = False
    """Validate before the first step."""
    metric: str | None = None
    """The metric that says which policy is best: ``validation/NAME/mean@n`` or ``validation/NAME/pass@k``; with
    ``algorithm.name=sft`` ``validation/NAME/loss``. Default: the mean, or the loss, of the first set."""
    direction: Direction | None = None
    """Whether the highest or the lowest ``metric`` is best. Default: the lowest loss, but the highest mean or
    pass@k."""
    keep_best: bool = False
    """Save a checkpoint when ``metric`` is better than in all earlier validations, and keep it in addition to the
    newest ones; ``checkpoints/best`` names it."""
    patience: int | None = Field(None, ge=1)
    """End the run after this number of validations in a row in which ``metric`` did not become better; null = never."""
    min_delta: float = Field(0.0, ge=0.0)
    """``patience``: the smallest change that counts as better."""

    def criterion(self, *, supervised: bool) -> tuple[str, Direction]:
        """Return the metric that says which policy is best, and whether its highest or lowest value is best."""
        default = self.sets[0].loss_metric if supervised else self.sets[0].mean_metric
        return self.metric or default, self.direction or ("min" if supervised else "max")

    @model_validator(mode="after")
    def _possible(self) -> ValidationSection:
        names = [one.name for one in self.sets]
        if len(set(names)) < len(names):
            twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
            raise ValueError(
                f"validation.sets: these names occur more than once: {twice}; give each set a different name"
            )
        known = [name for one in self.sets for name in (one.mean_metric, *map(one.pass_metric, one.pass_at))]
        known += [one.loss_metric for one in self.sets]
        if self.metric is not None and self.metric not in known:
            hint = did_you_mean(self.metric, known)
            raise ValueError(f"unknown metric {self.metric}; {hint or 'known metrics: ' + ', '.join(known)}")
        if self.every_steps is None and (self.keep_best or self.patience):
            raise ValueError(
                "keep_best and patience compare several validations, but only the last step is validated: set "
                "every_steps"
            )
        return self
