"""``anytron chat``: what a model answers, for a person to see what a run has learnt."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import ConfigError
from anytron.cli.single_rank import POLICY_ALONE, alone, checkpoint_config, export_model, override
from anytron.cli.output import ScratchDirectory, error_console
from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.config.load import load_config
from anytron.config.schema import RunConfig
from anytron.record.checkpoint.directory import locate
from anytron.run.preflight.open_run import open_run
from anytron.task.data.model_files import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anytron.run.rollout.answers import Answers

AT_ONCE = 64
"""Prompts of a file that are answered together."""
_NEW_TOKENS = 256
"""Longest answer of a model directory, of which no run says how long answers are."""
_READING = "config.yaml"


@dataclass(frozen=True)
class Found:
    """What a path stands for.

    Attributes:
        model: The model directory.
        config: Of the run that it comes from; None if it comes from nowhere.
        start: The directory that the run began with; None if there is none.
    """

    model: Path
    config: RunConfig | None
    start: Path | None


def run_chat(
    path: Path,
    overrides: Sequence[str],
    *,
    compare: bool,
    max_new_tokens: int | None,
    temperature: float,
    system: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Answer the prompts on the standard input, one a line; at a terminal, as they are typed.

    Raises:
        AnytronError: ``path`` is neither a model nor a run nor a checkpoint, or the model cannot be started.
    """
    notes = error_console()
    with ScratchDirectory("chat", notes) as scratch, contextlib.ExitStack() as stack:
        found = find(path, scratch.path, overrides)
        models = {"answer": found.model}
        if compare:
            if found.start is None:
                raise ConfigError(
                    "The model that the run began with is not known.",
                    where=str(path),
                    why="this is a model directory" if found.config is None else "its directory is gone",
                    fix="give the directory of a run, or leave --compare out",
                )
            models = {"before": found.start, "after": found.model}
        answers = {}
        for name, model in models.items():
            settings = [
                *([] if found.config is None else [*alone(found.config), *POLICY_ALONE]),
                override("model.tokenizer", found.model),
                override("trainer.output_dir", scratch.path / name),
                f"rollout.max_new_tokens={max_new_tokens or _longest(found)}",
                *(["rollout.top_k=1"] if temperature == 0 else [f"rollout.temperature={temperature}"]),
            ]
            yaml = scratch.path / f"{name}.yaml"
            yaml.write_text(to_yaml(_config(model, found.config)), encoding="utf-8")
            run = open_run(yaml, [*settings, *overrides], relative_to=Path.cwd())
            if name == next(iter(models)):
                for line in run.lines:
                    notes.print(line)
            refuse(run.diagnostics)
            executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")
            executor = stack.enter_context(executor_class(run.config, run.session))

            from anytron.run.rollout.answers import Answers

            answers[name] = Answers(run.config, executor)
        for prompts in _lines():
            _answer(prompts, answers, system=system, seed=seed, as_json=as_json)


def find(path: Path, scratch: Path, overrides: Sequence[str]) -> Found:
    """Find the model that a path stands for; a checkpoint is exported.

    Args:
        path: A model directory, a run, its checkpoints, a checkpoint, or the file ``best``.
        scratch: Where an exported model lies.
        overrides: Of the command line, for the export.
    """
    from anytron.run.trainer.models import model_directory

    if (path / "config.json").is_file():
        return Found(path.absolute(), None, None)
    if (path / "hf" / "config.json").is_file() and (path / _READING).is_file():
        config = load_config(path / _READING)
        model = (path / "hf").absolute()
    else:
        checkpoint = locate(path)
        config = checkpoint_config(checkpoint)
        model = scratch / "model"
        export_model(path, model, overrides)
    start = model_directory(config)
    return Found(model, config, start if start.is_dir() else None)


def _longest(found: Found) -> int:
    return _NEW_TOKENS if found.config is None or found.config.supervised else found.config.rollout.max_new_tokens


def _config(model: Path, config: RunConfig | None) -> RunConfig:
    """Make the configuration in which a directory answers: its rollout engine, one process, nothing else of a run."""
    if config is None:
        fields = {
            "model": {"path": str(model), "dtype": _dtype(model)},
            "data": {"source": "jsonl", "options": {"path": "unread"}},
            "rewards": [{"function": "exact_match"}],
        }
        return RunConfig.model_validate(fields)
    section = config.model.model_copy(update={"path": str(model), "config": None, "lora": None})
    return config.model_copy(update={"model": section})


def _dtype(model: Path) -> str:
    """The dtype in which a directory's weights are, if a model can be computed in it."""
    fields = read_config(model)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return "bfloat16" if dtype in ("bfloat16", "float16") else "float32"


def _lines() -> Iterator[list[str]]:
    """Yield what is typed, one prompt at a time; of a file, some at a time."""
    if not sys.stdin.isatty():
        lines = [line.strip() for line in sys.stdin]
        asked = [line for line in lines if line]
        for begin in range(0, len(asked), AT_ONCE):
            yield asked[begin : begin + AT_ONCE]
        return
    with contextlib.suppress(ImportError):  # some systems' Python has none
        import readline  # noqa: F401 - lets input() edit lines
    print("Type a prompt; Ctrl-D ends.", file=sys.stderr)
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> ").strip():
                yield [line]


def _answer(
    prompts: Sequence[str], models: Mapping[str, Answers], *, system: str | None, seed: int, as_json: bool
) -> None:
    answers = {name: model(prompts, system=system, seed=seed) for name, model in models.items()}
    for place, prompt in enumerate(prompts):
        given = {name: texts[place] for name, texts in answers.items()}
        if as_json:
            print(json.dumps({"prompt": prompt, **given}, ensure_ascii=False), flush=True)
            continue
        if not sys.stdin.isatty():
            print(f"> {prompt}")
        width = max(map(len, given))
        for name, text in given.items():
            print(f"{name:{width}}  {text}" if len(given) > 1 else text, flush=True)
