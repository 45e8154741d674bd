"""``anytron chat``: let a model answer prompts, so that a person sees what a run has learnt."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import ConfigError, DataError
from anytron.cli.chat_model import (
    FoundModel,
    check_tokenizer,
    context_length,
    find_beginning,
    find_model,
    stored_dtype,
    takes_images,
)
from anytron.cli.output import LOGS, ScratchDirectory, error_console
from anytron.cli.single_rank import override
from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.config.generation import RolloutSection
from anytron.config.schema import RunConfig
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from anytron.run.preflight.open_run import OpenRun
    from anytron.run.rollout.answers import Answer, Answers

AT_ONCE = 64
"""Prompts that are answered together, at most."""
NEW_TOKENS = 256
"""Longest answer, in tokens, if no run sets ``rollout.max_new_tokens``."""
OF_ANSWERS = ("rollout.", "platform.", "executor.", "data.chat_template_kwargs", "model.dtype", "model.tokenizer")
OF_EXPORT = ("model.", "engine.", "platform.", "executor.")
"""Beginnings of the keys that the user may set: for the answers, and to write the model of a checkpoint."""
CONCERNED = ("rollout", "platform", "executor", "model.dtype", "model.tokenizer", "trainer.output_dir")
"""Keys whose diagnostics concern the answers; others are about training."""
ENGINE = "transformers"
"""The rollout engine that answers unless the user sets another: it needs no further package and takes every model."""


def run_chat(
    path: Path,
    overrides: Sequence[str],
    *,
    compare: bool,
    max_new_tokens: int | None,
    temperature: float,
    system: str | None,
    plain: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Answer the prompts on the standard input, one a line; at a terminal, as they are typed.

    Args:
        path: A model directory, a run, or a checkpoint.
        overrides: Keys to set; relative paths are relative to the current directory.
        compare: Whether the model that the run began with answers too.
        max_new_tokens: Longest answer; None = the run's ``rollout.max_new_tokens``, or :data:`NEW_TOKENS`.
        temperature: Temperature of the sampling; 0 = the most probable token.
        system: The system message; None = the one of the run's data, if there is one.
        plain: Whether the chat template is left out.
        seed: Seed of the sampling.
        as_json: Whether a JSON object is printed for each prompt.

    Raises:
        AnytronError: ``path`` has no usable model, a file cannot be used, or the model cannot be started; or, if the
            standard input is not a terminal, a prompt cannot be answered.
    """
    _check_keys(overrides)
    notes = error_console()
    found = find_model(path)
    models = {"answer": found}
    if compare:
        models = {"before": find_beginning(found, path, overrides), "after": found}
    for model in models.values():
        model.check()
    if found.checkpoint is None:
        check_tokenizer(found.place, overrides)
    typed = sys.stdin is not None and sys.stdin.isatty()
    batches = iter(()) if typed else _given()
    tell = _once(notes.print)
    with ScratchDirectory("chat", notes) as scratch, contextlib.ExitStack() as stack:
        exported = {
            name: model.directory(
                scratch.path / name, _chosen(overrides, OF_EXPORT), f"anytron chat {quote(str(path))}", tell
            )
            for name, model in models.items()
        }
        trained = exported["after" if compare else "answer"]
        longest = _longest(found, trained, max_new_tokens)
        opened = {}
        for name, directory in exported.items():
            config = _configuration(directory, found.config, longest, temperature)
            file = scratch.path / f"{name}.yaml"
            file.write_text(to_yaml(config), encoding="utf-8")
            own = [override("trainer.output_dir", scratch.path / LOGS / name)]
            if compare:
                own.append(override("model.tokenizer", trained))  # the model at the start may have none
            opened[name] = _opened(file, [*own, *_chosen(overrides, OF_ANSWERS)])
        for line in _remarks(found.config, trained, next(iter(opened.values()))):
            tell(line)

        from anytron.run.rollout.answers import Answers

        if system is None and not plain:
            system = _system_of(found.config)
        answers = {}
        for name, run in opened.items():
            notes.print(f"starting {'the model' if name == 'answer' else name}: {models[name].place}")
            executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")
            executor = stack.enter_context(executor_class(run.config, run.session))
            answers[name] = Answers(run.config, executor, system=system, plain=plain, seed=seed)
            stack.callback(answers[name].close)
        for one in answers.values():
            one.load()
        printer = _Printer(notes, as_json=as_json)
        if typed:
            _talk(answers, printer, notes)
        for prompts in batches:
            printer.show(prompts, {name: model(prompts) for name, model in answers.items()}, echo=not as_json)


def _once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes on each line the first time: several configurations are opened."""
    said: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in said:
            said.add(line)
            tell(line)

    return tell_once


def _check_keys(overrides: Sequence[str]) -> None:
    """Refuse keys that have no effect here."""
    for one in overrides:
        if not one.startswith((*OF_ANSWERS, *OF_EXPORT)):
            sections = ", ".join(sorted({key.split(".")[0] for key in (*OF_ANSWERS, *OF_EXPORT)}))
            raise ConfigError(
                "anytron chat does not use this key.",
                where=one,
                why=f"only keys of these sections can have an effect: {sections}",
                fix="remove it; options of the command begin with --, for example --max-new-tokens",
            )


def _chosen(overrides: Sequence[str], beginnings: tuple[str, ...]) -> list[str]:
    return [one for one in overrides if one.startswith(beginnings)]


def _longest(found: FoundModel, directory: Path, asked: int | None) -> int:
    """Choose the longest answer, so that the model's context has room for a prompt before it."""
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


def _configuration(directory: Path, run: RunConfig | None, longest: int, temperature: float) -> RunConfig:
    """Make the configuration with which a model answers: a rollout engine in one process, and nothing to train."""
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


def _opened(file: Path, overrides: Sequence[str]) -> OpenRun:
    """Open the configuration, and refuse it if it has mistakes that concern the answers."""
    run = open_run(file, overrides, relative_to=Path.cwd())
    run = replace(run, diagnostics=[one for one in run.diagnostics if one.key.startswith(CONCERNED)])
    refuse(run.diagnostics)
    if generates_in_training(run.config):
        raise ConfigError(
            "anytron chat cannot use this rollout engine.",
            where=f"rollout.engine = {run.config.rollout.engine}",
            why="it generates on the training ranks, and anytron chat starts no training ranks",
            fix=f"set rollout.engine={ENGINE}, or remove rollout.engine",
        )
    return run


def _remarks(run: RunConfig | None, directory: Path, opened: OpenRun) -> Iterator[str]:
    """Yield the lines of the opened configuration, and the ways in which answers differ from the run's rollouts."""
    yield from opened.lines
    engine = opened.config.rollout.engine
    if run is not None and not run.supervised and run.rollout.engine != engine:
        yield f"answers come from the rollout engine {engine}; the run uses {run.rollout.engine}"
    if run is not None and run.model.lora is not None and run.model.lora.path is not None:
        yield "the model at the start is shown without the adapters of model.lora.path"
    if run is not None and run.environment is not None:
        yield "the model answers once; the environment of the run is not used"
    if takes_images(directory):
        yield "the model also takes images; anytron chat gives it text only"


def _system_of(config: RunConfig | None) -> str | None:
    """The system message with which the run's data begin conversations."""
    options = {} if config is None else config.data.options
    system = options.get("system") if options.get("chat") else None
    return system if isinstance(system, str) else None


def _typed() -> Iterator[str]:
    """Yield the lines that are typed at a terminal, until Ctrl-D."""
    with contextlib.suppress(ImportError):  # some builds of Python have no readline
        import readline  # noqa: F401 - lets input() edit lines
    with contextlib.suppress(EOFError):
        while True:
            if sys.stdout.isatty():
                line = input("> ")
            else:
                print("> ", end="", file=sys.stderr, flush=True)
                line = input()
            if line.strip():
                yield line
    print(file=sys.stderr)


def _given() -> Iterator[dict[int, str]]:
    """Wait for the first prompts of an input that is not a terminal.

    Returns:
        All prompts, by their line numbers, in batches: what the input holds at one time, at most :data:`AT_ONCE`.

    Raises:
        DataError: There is no prompt, or a line is not valid UTF-8.
    """
    batches = _batches()
    first = next(batches, None)
    if first is None:
        raise DataError(
            "There are no prompts.",
            where="standard input",
            why="it ended without a line of text",
            fix='write one prompt a line: echo "PROMPT" | anytron chat PATH; or start the command at a terminal',
        )
    return itertools.chain([first], batches)


def _batches() -> Iterator[dict[int, str]]:
    if sys.stdin is None:  # closed
        return
    number, rest = 0, b""
    while block := os.read(sys.stdin.fileno(), 1 << 16):
        *lines, rest = (rest + block).split(b"\n")
        yield from _numbered(lines, number)
        number += len(lines)
    yield from _numbered([rest], number)


def _numbered(lines: Sequence[bytes], before: int) -> Iterator[dict[int, str]]:
    """Decode lines, and yield those that are not blank by their numbers, some at a time."""
    some: dict[int, str] = {}
    for number, line in enumerate(lines, before + 1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            fix = "convert the file: iconv -f ENCODING -t utf-8"
            raise DataError(
                "A prompt is not valid UTF-8.", where=f"line {number} of standard input", why=str(error), fix=fix
            ) from error
        if text.strip():
            some[number] = text
        if len(some) == AT_ONCE:
            yield some
            some = {}
    if some:
        yield some


def _talk(answers: Mapping[str, Answers], printer: _Printer, notes: Console) -> None:
    """Answer what is typed. If a prompt cannot be answered, its error is printed and the next one may be typed."""
    notes.print("Type a prompt; each is answered by itself. Ctrl-D ends.")
    for number, line in enumerate(_typed(), 1):
        prompts = {number: line}
        try:
            printer.show(prompts, {name: model(prompts) for name, model in answers.items()}, echo=False)
        except DataError as error:
            notes.print(f"error: {error}")


class _Printer:
    """Prints answers to stdout, and remarks about them to the notes.

    Args:
        notes: Console on stderr.
        as_json: Whether an object is printed for each prompt.
    """

    def __init__(self, notes: Console, *, as_json: bool) -> None:
        self._notes, self._as_json = notes, as_json
        self._said_cut = False

    def show(self, prompts: Mapping[int, str], answers: Mapping[str, Sequence[Answer]], *, echo: bool) -> None:
        """Print the answers of all models to each prompt.

        Args:
            prompts: The prompts by their numbers.
            answers: The answers to all of them, by the name of the model.
            echo: Whether the prompts are written to the notes.
        """
        for place, prompt in enumerate(prompts.values()):
            given = {name: each[place] for name, each in answers.items()}
            if echo:
                self._notes.print(f"> {prompt}")
            if self._as_json:
                print(json.dumps({"prompt": prompt, **{name: one.text for name, one in given.items()}}), flush=True)
            else:
                self._print(given)
            if not self._said_cut and not all(one.finished for one in given.values()):
                self._said_cut = True
                self._notes.print("(an answer was cut; --max-new-tokens sets the longest one)")

    def _print(self, given: Mapping[str, Answer]) -> None:
        width = max(map(len, given)) + 2
        for name, one in given.items():
            head = f"{name}:".ljust(width) if len(given) > 1 else ""
            print(head + one.text.replace("\n", "\n" + " " * len(head)), flush=True)
