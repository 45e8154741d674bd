"""Load the sets of prompts that a run validates with, and check them against the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anytron.base.errors import within
from anytron.task.data.mixture import Mixture, load_mixture
from anytron.task.rewards.scoring import RewardSum

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.config.scoring import ValidationSetSection
    from anytron.run.preflight.prepare import PreparedPrompts, PreparedRun


@dataclass(frozen=True)
class ValidationSet:
    """A set of prompts on which the policy is examined.

    Attributes:
        section: Its configuration.
        prepared: The run with this set's prompts in the place of training's, its rewards and its sampling. It shares
            nothing with training that changes.
        at_one_time: Prompts that are answered at one time.
    """

    section: ValidationSetSection
    prepared: PreparedRun
    at_one_time: int


def prepare_validation(config: RunConfig, prepared: PreparedRun) -> list[ValidationSet]:
    """Load the sets of a run.

    Args:
        config: The run.
        prepared: What training needs of it.

    Raises:
        ConfigError: Something that a set names is missing or impossible.
        DataError: Its prompts are not usable, or there are none.
    """
    sets = []
    for index, section in enumerate([] if config.validation is None else config.validation.sets):
        with within(section.title):
            sets.append(_prepare_set(section, f"validation.sets.{index}.data", config, prepared))
    return sets


@dataclass(frozen=True)
class HeldOutSet:
    """Examples whose loss is measured.

    Attributes:
        section: Their configuration.
        prepared: The run with these examples in the place of training's.
    """

    section: ValidationSetSection
    prepared: PreparedPrompts


def prepare_held_out(config: RunConfig, prepared: PreparedPrompts) -> list[HeldOutSet]:
    """Load the validation sets of supervised fine-tuning; otherwise as :func:`prepare_validation`."""
    sets = []
    for index, section in enumerate([] if config.validation is None else config.validation.sets):
        with within(section.title):
            examples = _prompts(section, f"validation.sets.{index}.data", prepared, None)
        sets.append(HeldOutSet(section, replace(prepared, sampler=examples)))
    return sets


def _prepare_set(section: ValidationSetSection, key: str, config: RunConfig, prepared: PreparedRun) -> ValidationSet:
    own = ("max_new_tokens", "temperature", "top_p", "top_k")
    given = {name: value for name in own if (value := getattr(section, name)) is not None}
    sampling = replace(prepared.sampling, **given)
    sampling = replace(sampling, min_new_tokens=min(sampling.min_new_tokens, sampling.max_new_tokens))
    rewards = RewardSum.from_config(section.rewards or config.rewards)
    prompts = _prompts(section, key, prepared, sampling.max_new_tokens, rewards)
    rewards.check([] if section.data.on_bad_answer == "drop" else prompts.tables)  # looked at as they were read
    own_prepared = replace(
        prepared,
        sampler=prompts,
        rewards=rewards,
        sampling=sampling,
        chat_template_kwargs=prepared.beginning.arguments(section.data.chat_template_kwargs),
    )
    # Patches of images are large: no more of them are held than in a training step.
    at_one_time = len(prompts) if prepared.vision is None else min(len(prompts), config.data.prompts_per_step)
    return ValidationSet(section, own_prepared, at_one_time)


def _prompts(
    section: ValidationSetSection,
    key: str,
    prepared: PreparedPrompts,
    max_new_tokens: int | None,
    rewards: RewardSum | None = None,
) -> Mixture:
    """Load a set's prompts, of which each is drawn once, in the order of the source."""
    tables = load_mixture(
        section.data,
        prepared.tokenizer,
        prepared.vision,
        beginning=prepared.beginning,
        seed=0,
        vocab_size=prepared.vocab_size,
        context_length=prepared.context_length,
        max_new_tokens=max_new_tokens,
        key=key,
        unusable=None if rewards is None else rewards.unusable(),
    ).tables
    return Mixture(tables, None, seed=0, shuffle=False)  # without weights: every prompt once
