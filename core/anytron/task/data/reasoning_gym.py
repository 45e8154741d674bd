"""Prompts from the procedural tasks of the library reasoning-gym (the extra ``reasoning-gym``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, did_you_mean
from anytron.task.data.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY = "reasoning_gym"
"""The entry of a prompt's data that the task's own verifier needs."""


def reasoning_gym(
    task: str, count: int = 1000, seed: int = 0, messages: bool = False, instructions: str = "", **options: Any
) -> Iterator[Prompt]:
    """Draw the prompts of a task; the reward ``reasoning_gym`` scores the responses.

    Args:
        task: Name of the task, for example ``spell_backward``.
        count: Number of prompts.
        seed: Seed of the task's generator.
        messages: Make each question a conversation, for the chat template, instead of plain text.
        instructions: Text to add after each question.
        options: Options of the task, for example ``max_word_len``.

    Yields:
        Prompts whose data have the right ``answer``, also as the ``response`` that supervised fine-tuning imitates, and
        the whole entry under ``reasoning_gym``.

    Raises:
        ConfigError: The library is not installed, it has no such task, or the task refuses its options.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise missing_library("data.source") from error
    if task not in DATASETS:
        fix = did_you_mean(task, DATASETS) or "choose a task from https://github.com/open-thought/reasoning-gym"
        where = "option `task` of the source reasoning_gym"
        raise ConfigError(f"reasoning-gym has no task {task!r}.", where=where, fix=fix)
    try:
        entries = create_dataset(task, size=count, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning-gym refuses the options of its task {task}.",
            where="options of the source reasoning_gym",
            why=f"{type(error).__name__}: {error}",
            fix=f"set only fields of reasoning-gym's {DATASETS[task][1].__name__}, to values that it accepts",
        ) from error
    for index in range(count):
        entry = entries[index]
        question = entry["question"] + instructions
        data = {"answer": entry["answer"], "response": entry["answer"], ENTRY: entry}
        if messages:
            yield Prompt(f"{task}-{index}", messages=({"role": "user", "content": question},), data=data)
        else:
            yield Prompt(f"{task}-{index}", text=question, data=data)


def missing_library(where: str) -> ConfigError:
    """Return the error that reasoning-gym is not installed."""
    return ConfigError("reasoning-gym is not installed.", where=where, fix="pip install 'anytron[reasoning-gym]'")
