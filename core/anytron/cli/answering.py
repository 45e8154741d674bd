"""The configuration with which a model answers, without a run: for ``anytron chat`` and ``anytron serve``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.cli.chat_model import FoundModel, context_length, stored_dtype, takes_images
from anytron.config.diagnostics import refuse
from anytron.config.generation import RolloutSection
from anytron.config.schema import RunConfig
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anytron.run.preflight.open_run import OpenRun

NEW_TOKENS = 256
"""Longest answer, in tokens, if no run sets ``rollout.max_new_tokens``."""
OF_ANSWERS = ("rollout.", "platform.", "executor.", "data.chat_template_kwargs", "model.dtype", "model.tokenizer")
OF_EXPORT = ("model.", "engine.", "platform.", "executor.")
"""Beginnings of the keys that the user may set: :data:`OF_ANSWERS` change how the model answers, :data:`OF_EXPORT` how
the model of a checkpoint is written."""
CONCERNED = ("rollout", "platform", "executor", "model.dtype", "model.tokenizer", "trainer.output_dir")
"""Keys whose diagnostics concern the answers; others are about training."""
ENGINE = "transformers"
"""The rollout engine that answers unless the user sets another: it needs no further package and takes every model."""


def said_once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes each line to ``tell`` once: opening several configurations repeats lines."""
    said: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in said:
            said.add(line)
            tell(line)

    return tell_once


def check_keys(overrides: Sequence[str], command: str) -> None:
    """Refuse keys that have no effect on answers.

    Args:
        overrides: The user's overrides.
        command: The command, for errors.

    Raises:
        ConfigError: A key has no effect.
    """
    for one in overrides:
        if not one.startswith((*OF_ANSWERS, *OF_EXPORT)):
            *most, last = sorted({key[:-1] for key in (*OF_ANSWERS, *OF_EXPORT) if key.endswith(".")})
            sections = f"{', '.join(most)} and {last}"
            raise ConfigError(
                f"{command} does not use this key.",
                where=one,
                why=f"only data.chat_template_kwargs and keys of the sections {sections} can have an effect",
                fix="remove this key; options of the command begin with --, for example --max-new-tokens",
            )


def chosen(overrides: Sequence[str], beginnings: tuple[str, ...]) -> list[str]:
    """Return the overrides whose keys have one of the beginnings."""
    return [one for one in overrides if one.startswith(beginnings)]


def longest_answer(found: FoundModel, directory: Path, asked: int | None) -> int:
    """Choose the largest number of tokens of an answer, such that the model's context has room for a prompt too.

    Args:
        found: The model.
        directory: The model directory.
        asked: The user's choice; None = ``rollout.max_new_tokens`` of the run, or :data:`NEW_TOKENS` without a run.

    Raises:
        ConfigError: There would be no room for a prompt.
    """
    context = context_length(directory)
    if asked is not None:
        if context is not None and asked >= context:
            raise ConfigError(
                "There is no room for a prompt.",
                where=f"--max-new-tokens {asked}",
                why=f"prompt and answer share the model's context, which has {context} tokens",
                fix=f"set --max-new-tokens {context // 2}",
            )
        return asked
    if found.config is not None and not found.config.supervised:
        return found.config.rollout.max_new_tokens
    return NEW_TOKENS if context is None else max(1, min(NEW_TOKENS, context // 2))


def answering_config(directory: Path, run: RunConfig | None, longest: int, temperature: float) -> RunConfig:
    """Make the configuration with which a model answers: a rollout engine in one process, and nothing to train.

    Args:
        directory: The model directory.
        run: Configuration of the run that made the model; None if it is not known.
        longest: Longest answer, in tokens.
        temperature: Temperature of the sampling; 0 = the most probable token.
    """
    trained = RolloutSection() if run is None else run.rollout
    sampling = {"top_k": 1} if temperature == 0 else {"temperature": temperature, "top_p": trained.top_p}
    if temperature != 0:
        sampling["top_k"] = trained.top_k
    rollout = {
        "engine": ENGINE,
        "options": trained.options if trained.engine == ENGINE else {},
        "max_new_tokens": longest,
        "max_batch_size": trained.max_batch_size,
        "num_threads": trained.num_threads,
        "stop": trained.stop,
        **sampling,
    }
    fields = {
        "model": {"path": str(directory), "dtype": stored_dtype(directory) if run is None else run.model.dtype},
        "data": {
            "source": "jsonl",
            "options": {"path": "unread"},
            "chat_template_kwargs": {} if run is None else run.data.chat_template_kwargs,
        },
        "rewards": [{"function": "exact_match"}],
        "rollout": rollout,
        "checkpoint": {"keep": 0},
    }
    if run is not None:
        fields["platform"] = run.platform.model_dump()
    return RunConfig.model_validate(fields)


def open_answering(file: Path, overrides: Sequence[str], command: str) -> OpenRun:
    """Open the configuration, and refuse it if it has mistakes that concern the answers.

    Args:
        file: File of the configuration.
        overrides: The overrides.
        command: The command, for errors.

    Raises:
        AnytronError: The configuration has mistakes, or its rollout engine needs training ranks.
    """
    run = open_run(file, overrides, relative_to=Path.cwd())
    run = replace(run, diagnostics=[one for one in run.diagnostics if one.key.startswith(CONCERNED)])
    refuse(run.diagnostics)
    if generates_in_training(run.config):
        raise ConfigError(
            f"{command} cannot use this rollout engine.",
            where=f"rollout.engine = {run.config.rollout.engine}",
            why=f"it generates on the training ranks, and {command} starts no training ranks",
            fix=f"set rollout.engine={ENGINE}, or remove rollout.engine",
        )
    return run


def remarks(run: RunConfig | None, directory: Path, opened: OpenRun, command: str) -> Iterator[str]:
    """Yield lines for the user: platform and warnings, and how the answers differ from the rollouts of the run."""
    yield from opened.lines
    engine = opened.config.rollout.engine
    if run is not None and not run.supervised and run.rollout.engine != engine:
        yield f"answers come from the rollout engine {engine}; the run uses {run.rollout.engine}"
    if run is not None and run.model.lora is not None and run.model.lora.path is not None:
        yield "the run began with the adapters of model.lora.path; its initial model answers without them"
    if run is not None and run.environment is not None:
        yield f"{command} does not use the environment of the run"
    if takes_images(directory):
        yield f"the model also takes images; {command} gives it text only"
