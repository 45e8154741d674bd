"""``anytron serve``: serve a model with OpenAI's API, so that programs can use what a run has learnt."""

from __future__ import annotations

import contextlib
from shlex import quote
from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, load_component
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
from anytron.cli.chat_model import check_tokenizer, find_model
from anytron.cli.output import LOGS, ScratchDirectory, error_console
from anytron.cli.single_rank import override
from anytron.config.dump import to_yaml
from anytron.serving.installation import check_installed
from anytron.serving.keys import KEY_VARIABLE, new_key, read_key, variable_key

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from anytron.run.preflight.open_run import OpenRun
    from anytron.workers.executor.protocol import Executor

COMMAND = "anytron serve"
ROUND_S = 0.05
"""Seconds after which the rollout engines are asked again, and new requests are passed to them."""


def run_serve(
    path: Path,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    key_file: Path | None,
    name: str | None,
    max_new_tokens: int | None,
) -> None:
    """Serve a model until Ctrl-C or a signal.

    Args:
        path: A model directory, a run, or a checkpoint.
        overrides: Keys to set; relative paths are relative to the current directory.
        host: Address to listen at.
        port: TCP port; 0 = a free one.
        key_file: File with the server's key; None = the environment variable, or a new key that is printed.
        name: Name of the model in requests; None = the name of the path.
        max_new_tokens: Longest answer if a request does not set one; None = as for ``anytron chat``.

    Raises:
        AnytronError: The packages of the server are missing, the address or the key cannot be used, ``path`` has no
            usable model, or the model cannot be started or fails later.
    """
    check_installed(COMMAND)
    check_keys(overrides, COMMAND)
    key, chosen_key = _key(key_file)
    found = find_model(path, COMMAND)
    found.check()
    if found.checkpoint is None:
        check_tokenizer(found.place, overrides, COMMAND)

    from anytron.serving.server import bind

    notes = error_console()
    tell = said_once(notes.print)
    with ScratchDirectory("serve", notes) as scratch, contextlib.closing(bind(host, port)) as bound:
        command = f"{COMMAND} {quote(str(path))}"
        directory = found.directory(scratch.path / "model", chosen(overrides, OF_EXPORT), command, tell)
        longest = longest_answer(found, directory, max_new_tokens)
        temperature = 1.0 if found.config is None else found.config.rollout.temperature
        file = scratch.path / "model.yaml"
        file.write_text(to_yaml(answering_config(directory, found.config, longest, temperature)), encoding="utf-8")
        own = [override("trainer.output_dir", scratch.path / LOGS)]
        run = open_answering(file, [*own, *chosen(overrides, OF_ANSWERS)], COMMAND)
        for line in remarks(found.config, directory, run, COMMAND):
            tell(line)
        notes.print(f"starting the model: {found.place}")
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")
        with executor_class(run.config, run.session) as executor:
            _serve(run, executor, bound, key, name or _name_of(path), notes, shown=None if chosen_key else key)


def _serve(
    run: OpenRun, executor: Executor, bound: socket.socket, key: str, name: str, notes: Console, *, shown: str | None
) -> None:
    """Load the model, and answer requests until a signal."""
    from anytron.run.rollout.directory_model import DirectoryModel
    from anytron.run.rollout.endpoint import limits_of, longest_context
    from anytron.serving.endpoint import Endpoint
    from anytron.serving.limits import Limits
    from anytron.serving.service import ServedModel

    model = DirectoryModel(run.config)
    context = longest_context(run.config, model.context)
    known = model.tokenizer, model.vocab_size, context, model.sampling
    served = ServedModel(name, *known, vision=model.vision(notes.print))
    with contextlib.ExitStack() as ends:
        limits = limits_of(run.config, Limits())
        endpoint = Endpoint(served, run.config.data.chat_template_kwargs, key, bound, limits)
        ends.callback(lambda: notes.print(_ended(endpoint.counts)))
        ends.enter_context(endpoint)
        model.start(executor)
        model.load()
        endpoint.start()
        if not endpoint.is_loopback:
            notes.print(
                "warning: other machines can reach this address; keys, prompts and answers are sent unencrypted"
            )
        if shown is not None:
            notes.print(f"key of this server (new at each start; {KEY_VARIABLE} or --key-file sets one): {shown}")
        notes.print(f"serving {name} at {endpoint.url}; Ctrl-C ends")
        while True:
            endpoint.check()
            endpoint.desk.work(model.pool, ROUND_S)


def _ended(counts: Mapping[str, int]) -> str:
    counted = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    return f"the server has ended; requests: {counted or 'none'}"


def _key(file: Path | None) -> tuple[str, bool]:
    """Return the server's key, and whether the user has chosen it."""
    given = variable_key()
    if file is not None:
        return read_key(file), True
    return (new_key(), False) if given is None else (given, True)


def _name_of(path: Path) -> str:
    """Return the name of a model: that of its directory."""
    return path.resolve().name or "model"
