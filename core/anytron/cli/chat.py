"""``anytron chat``: let a model answer prompts, so that a person sees what a run has learnt."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from shlex import quote
from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import DataError
from anytron.cli.answering import (
    OF_ANSWERS,
    OF_EXPORT,
    answering_config,
    check_keys,
    chosen,
    longest_answer,
    open_answering,
    remarks,
    said_once,
)
from anytron.cli.chat_model import check_tokenizer, find_beginning, find_model
from anytron.cli.output import LOGS, ScratchDirectory, error_console
from anytron.cli.single_rank import override
from anytron.config.dump import to_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from anytron.config.schema import RunConfig
    from anytron.run.rollout.answers import Answer, Answers

AT_ONCE = 64
"""Prompts that are answered together, at most."""
COMMAND = "anytron chat"


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
        max_new_tokens: Longest answer; None = the run's ``rollout.max_new_tokens``, or
            :data:`~anytron.cli.answering.NEW_TOKENS`.
        temperature: Temperature of the sampling; 0 = the most probable token.
        system: The system message; None = the one of the run's data, if there is one.
        plain: Whether the chat template is left out.
        seed: Seed of the sampling.
        as_json: Whether a JSON object is printed for each prompt.

    Raises:
        AnytronError: ``path`` has no usable model, a file cannot be used, or the model cannot be started; or, if the
            standard input is not a terminal, a prompt cannot be answered.
    """
    check_keys(overrides, COMMAND)
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
    tell = said_once(notes.print)
    with ScratchDirectory("chat", notes) as scratch, contextlib.ExitStack() as stack:
        exported = {
            name: model.directory(
                scratch.path / name, chosen(overrides, OF_EXPORT), f"{COMMAND} {quote(str(path))}", tell
            )
            for name, model in models.items()
        }
        trained = exported["after" if compare else "answer"]
        longest = longest_answer(found, trained, max_new_tokens)
        opened = {}
        for name, directory in exported.items():
            config = answering_config(directory, found.config, longest, temperature)
            file = scratch.path / f"{name}.yaml"
            file.write_text(to_yaml(config), encoding="utf-8")
            own = [override("trainer.output_dir", scratch.path / LOGS / name)]
            if compare:
                own.append(override("model.tokenizer", trained))  # the model at the start may have none
            opened[name] = open_answering(file, [*own, *chosen(overrides, OF_ANSWERS)], COMMAND)
        for line in remarks(found.config, trained, next(iter(opened.values())), COMMAND):
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
            fix = "convert the prompts: iconv -f ENCODING -t utf-8 FILE | anytron chat PATH"
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
