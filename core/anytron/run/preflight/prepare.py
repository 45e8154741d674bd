"""Load the prompts of a run and of its validation, and check them against the model, before an engine is built."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.algorithms.registered import load_advantage, policy_loss_function
from anytron.base.errors import ConfigError, within
from anytron.config.running import TeacherSection
from anytron.record.checkpoint.resume import first_beginning
from anytron.task.data.beginning import Beginning
from anytron.task.data.examination import examined
from anytron.task.data.loading import silent
from anytron.task.data.mixture import Mixture, Place, load_mixture
from anytron.task.data.pretrained import end_token_ids, load_hf_config, load_tokenizer, padding_token_id
from anytron.task.data.vision import VisionProcessor, load_vision
from anytron.task.environments.pool import check_environment
from anytron.task.rewards.scoring import RewardSum
from anytron.workers.engines.rollout_engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.config.running import RewardModelSection
    from anytron.config.schema import RunConfig
    from anytron.config.scoring import ValidationSetSection
    from anytron.task.data.prompts import TokenizedPrompt

    Tell = Callable[[str], None]

SHOWN = 3
"""Largest number of tokens that an error names."""


@dataclass(frozen=True)
class PreparedPrompts:
    """The prompts of a run, as its model reads them; in supervised fine-tuning, with the responses to learn.

    Attributes:
        tokenizer: A Hugging Face tokenizer.
        vision: Image processor; None for a model without images.
        sampler: Sampler of the prompts.
        context_length: Largest number of tokens, prompt and response together, that the model, the teacher and the
            reward model all accept; None = unlimited.
        vocab_size: Upper bound of token ids, exclusive.
        beginning: The time at which the run began, and its chat template, which the tokenizer uses.
        chat_template_kwargs: Arguments of the chat template: the configured ones, and a template whose clock shows the
            time in ``beginning`` if the template reads the clock.
        remarks: Lines for the user about what was restored from the earlier run.
    """

    tokenizer: Any
    vision: VisionProcessor | None
    sampler: Mixture
    context_length: int | None
    vocab_size: int
    beginning: Beginning
    chat_template_kwargs: Mapping[str, Any]
    remarks: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def places(self) -> tuple[Place, ...]:
        """The place in each source of prompts at which the next draw begins."""
        return self.sampler.places

    def draw(self, count: int) -> list[TokenizedPrompt]:
        """Return the next prompts. Their images are preprocessed only here, because patches need much memory."""
        prompts = self.sampler.draw(count)
        if self.vision is None:
            return prompts
        return [
            replace(prompt, patches=self.vision.patches(prompt.images, f"prompt {prompt.id}"))
            if prompt.images
            else prompt
            for prompt in prompts
        ]


@dataclass(frozen=True)
class PreparedRun(PreparedPrompts):
    """The prompts, rewards and sampling parameters of a run, for the driver.

    Attributes:
        rewards: The reward functions, checked.
        sampling: How responses are sampled.
    """

    rewards: RewardSum
    sampling: SamplingParams


def prepare_prompts(config: RunConfig, tell: Tell = silent) -> PreparedPrompts:
    """Load the tokenizer and all prompts, or examples, and check them against the model.

    A resumed run keeps the chat template and the start time with which it began.

    Args:
        config: The run's configuration.
        tell: Called with a line about the progress, from time to time while a long source is read.

    Raises:
        ConfigError: A file or value in the configuration is missing or impossible.
        DataError: Prompts are not usable.
        CheckpointError: ``resume`` names a checkpoint that is missing or damaged.
    """
    return _prompts(config, None if config.supervised else config.rollout.max_new_tokens, tell)


def prepare(config: RunConfig, tell: Tell = silent) -> PreparedRun:
    """Load the prompts and rewards of a run, and check them against the model; arguments as in :func:`prepare_prompts`.

    Raises:
        ConfigError: A file or value in the configuration is missing or impossible.
        DataError: Prompts are not usable.
        CheckpointError: ``resume`` names a checkpoint that is missing or damaged.
    """
    load_advantage(config.algorithm)
    policy_loss_function(config.algorithm)
    rewards = RewardSum.from_config(config.rewards)
    if config.environment is not None:
        check_environment(config.environment)
    prompts = _prompts(config, config.rollout.max_new_tokens, tell)
    rewards.check([] if config.data.on_bad_answer == "drop" else prompts.sampler.tables)  # looked at as they were read
    tokenizer, vision, vocab_size = prompts.tokenizer, prompts.vision, prompts.vocab_size
    ends = end_token_ids(config.model, tokenizer, vocab_size)
    padding = padding_token_id(config.model, tokenizer, ends, vocab_size)
    if vision is not None:
        vision.check_padding(padding)
    return PreparedRun(
        **vars(prompts),
        rewards=rewards,
        sampling=SamplingParams.from_config(config.rollout, end_token_ids=ends, pad_token_id=padding),
    )


def _prompts(config: RunConfig, max_new_tokens: int | None, tell: Tell) -> PreparedPrompts:
    sections = {"teacher.path": config.teacher, "reward_model.path": config.reward_model}
    asked = {key: section for key, section in sections.items() if section is not None}
    critic = None if config.critic is None or config.critic.path is None else Path(config.critic.path)
    with examined(config.model, {key: Path(section.path) for key, section in asked.items()}, critic) as found:
        hf_config = load_hf_config(config.model)
        tokenizer = load_tokenizer(config.model)
    text_config = hf_config.get_text_config()
    earlier = first_beginning(config)
    beginning = earlier or Beginning.of(tokenizer)
    remarks: tuple[str, ...] = ()
    if tokenizer.chat_template != beginning.chat_template:
        remarks = ("the chat template has changed: the run continues with its original chat template",)
        tokenizer.chat_template = beginning.chat_template
    contexts = [getattr(text_config, "max_position_embeddings", None)]
    for key, section in asked.items():
        check_vocabulary(section, found[key].vocabulary, tokenizer)
        contexts.append(found[key].context_length)
    context_length = min((one for one in contexts if one is not None), default=None)
    vision = load_vision(config.model, hf_config, tokenizer, tell)
    if vision is not None and config.environment is not None and not config.environment.is_agent:
        raise ConfigError(
            "Vision-language models cannot be trained in an environment yet.",
            where="environment",
            why="in a later turn, image tokens that the model wrote would count as images of the prompt",
            fix="write the environment as an agent (environment.agent), or choose a model that takes text only",
        )
    drops = not config.supervised and config.data.on_bad_answer == "drop"
    sampler = load_mixture(
        config.data,
        tokenizer,
        vision,
        beginning=beginning,
        seed=config.trainer.seed,
        vocab_size=text_config.vocab_size,
        context_length=context_length,
        max_new_tokens=max_new_tokens,
        unusable=RewardSum.from_config(config.rewards).unusable() if drops else None,
        tell=tell,
    )
    template, vocab_size = beginning.arguments(config.data.chat_template_kwargs), text_config.vocab_size
    return PreparedPrompts(tokenizer, vision, sampler, context_length, vocab_size, beginning, template, remarks=remarks)


def check_vocabulary(asked: TeacherSection | RewardModelSection, theirs: Mapping[str, int], tokenizer: Any) -> None:
    """Compare a model's vocabulary with the policy's, token by token.

    The model scores the token ids that the policy generates. Additional tokens of the model are harmless: the policy
    never generates them.

    Args:
        asked: Configuration section of the model, which is the teacher or the reward model.
        theirs: Token ids of that model, by token.
        tokenizer: Tokenizer of the policy, a ``transformers.PreTrainedTokenizerBase``.

    Raises:
        ConfigError: A token of the policy has a different id in the model's vocabulary, or is missing there.
    """
    own = tokenizer.get_vocab()
    differing = sorted((number, token) for token, number in own.items() if theirs.get(token) != number)
    if not differing:
        return
    shown = (
        f"{token!r} has id {number} in the policy, {theirs.get(token, 'none')} in this model"
        for number, token in differing[:SHOWN]
    )
    why = (
        f"{len(differing)} of the policy's {len(own)} tokens have a different id in this model, or are missing there: "
        + "; ".join(shown)
    )
    if isinstance(asked, TeacherSection):
        raise ConfigError(
            "The teacher's vocabulary differs from the policy's.",
            where=f"teacher.path = {asked.path}",
            why=why,
            fix="use a teacher of the same family, with the policy's tokenizer; to learn from a model with another "
            "tokenizer, generate responses with it and fine-tune the policy on them",
        )
    raise ConfigError(
        "The reward model's vocabulary differs from the policy's.",
        where=f"reward_model.path = {asked.path}",
        why=why,
        fix="use a reward model of the same family, with the policy's tokenizer, because responses are not tokenized "
        "again; call a model with another tokenizer from your own reward function",
    )


@dataclass(frozen=True)
class ValidationSet:
    """A set of prompts on which the policy is validated.

    Attributes:
        section: Configuration section of the set.
        prepared: The run with the prompts, rewards and sampling of this set instead of the training ones. It shares no
            mutable state with training.
        at_one_time: Number of prompts that are answered at one time.
    """

    section: ValidationSetSection
    prepared: PreparedRun
    at_one_time: int


def prepare_validation(config: RunConfig, prepared: PreparedRun) -> list[ValidationSet]:
    """Load the validation sets of a run.

    Args:
        config: The run's configuration.
        prepared: The prepared training data of the run.

    Raises:
        ConfigError: A file or value of a set is missing or impossible.
        DataError: The prompts of a set are not usable, or a set has no prompts.
    """
    sets = []
    for index, section in enumerate([] if config.validation is None else config.validation.sets):
        with within(section.title):
            sets.append(_prepare_set(section, f"validation.sets.{index}.data", config, prepared))
    return sets


@dataclass(frozen=True)
class HeldOutSet:
    """A validation set of supervised fine-tuning: examples whose loss is measured.

    Attributes:
        section: Configuration section of the set.
        prepared: The run with these examples instead of the training examples.
    """

    section: ValidationSetSection
    prepared: PreparedPrompts


def prepare_held_out(config: RunConfig, prepared: PreparedPrompts) -> list[HeldOutSet]:
    """Load the validation sets of supervised fine-tuning; arguments and errors as in :func:`prepare_validation`."""
    sets = []
    for index, section in enumerate([] if config.validation is None else config.validation.sets):
        with within(section.title):
            examples = _set_prompts(section, f"validation.sets.{index}.data", prepared, None)
        sets.append(HeldOutSet(section, replace(prepared, sampler=examples)))
    return sets


def _prepare_set(section: ValidationSetSection, key: str, config: RunConfig, prepared: PreparedRun) -> ValidationSet:
    own = ("max_new_tokens", "temperature", "top_p", "top_k")
    given = {name: value for name in own if (value := getattr(section, name)) is not None}
    sampling = replace(prepared.sampling, **given)
    sampling = replace(sampling, min_new_tokens=min(sampling.min_new_tokens, sampling.max_new_tokens))
    rewards = RewardSum.from_config(section.rewards or config.rewards)
    prompts = _set_prompts(section, key, prepared, sampling.max_new_tokens, rewards)
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


def _set_prompts(
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
