"""``anytron replay``: do an update that gave NaN or infinity again, and print where the first such number arises."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import DataError
from anytron.cli.alone import alone, override
from anytron.cli.output import error_console
from anytron.cli.scratch import ScratchDirectory
from anytron.config.diagnostics import refuse
from anytron.config.load import load_config
from anytron.run.preflight.capabilities import replay_diagnostics
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.directory import Checkpoint
    from anytron.run.trainer.bad_batch import BadUpdate
    from anytron.run.trainer.replay import Finding
    from anytron.workers.engines.inspection import NonFinite


def run_replay(path: Path, overrides: Sequence[str], *, checkpoint: Path | None, as_json: bool) -> bool:
    """Replay a saved mini-batch, print what was found, and say whether every number was finite.

    Args:
        path: A directory below ``bad_batches/``.
        overrides: Keys of the run's configuration to change, for example ``model.dtype=float32``.
        checkpoint: A checkpoint to take the weights from.
        as_json: Print JSON.

    Raises:
        AnytronError: The directory, the configuration or the machine is not fit for it.
    """
    from anytron.record.checkpoint.directory import locate
    from anytron.run.trainer.bad_batch import CONFIG, read_bad_batch

    notes = error_console()
    path = path.resolve()
    update, batch = read_bad_batch(path)
    found = None if checkpoint is None else locate(checkpoint)
    if found is not None:
        found.verify()
    config = load_config(path / CONFIG)
    origin, weights = _weights(path, config, found)
    with ScratchDirectory("replay", notes) as scratch:
        own = [*alone(config), override("trainer.output_dir", scratch.path), *weights]
        run = open_run(path / CONFIG, [*own, *overrides])
        for line in run.lines:
            notes.print(line)
        refuse([*run.diagnostics, *replay_diagnostics(run.config)])
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")

        from anytron.run.trainer.replay import replay  # torch: only when nothing has been found wrong so far

        notes.print(f"replaying step {update.step}, update {update.update} of the {update.model}, from {origin}")
        files = None if found is None else found.training
        with executor_class(run.config, run.session) as executor:
            finding = replay(update, batch, run.config, executor, files)
    print(json.dumps(_record(update, finding, origin), indent=2) if as_json else "\n".join(_lines(finding)))
    return not finding.reproduced


def _weights(path: Path, config: RunConfig, checkpoint: Checkpoint | None) -> tuple[str, list[str]]:
    """Find what the update starts from: its name for people, and overrides."""
    from anytron.run.trainer.initial_model import model_directory

    made = config.model.path is None
    initial = [override("model.path", model_directory(config)), "model.config=null"] if made else []
    if checkpoint is not None:
        return f"the checkpoint of step {checkpoint.step}", initial
    if (path / "critic").is_dir():
        return "its weights at that time", [*initial, override("critic.path", path / "critic")]
    if (path / "adapter").is_dir():
        return "its adapters at that time", [*initial, override("model.lora.path", path / "adapter")]
    if (path / "model").is_dir():
        tokenizer = [] if config.model.tokenizer else [override("model.tokenizer", config.model.path)]
        return "its weights at that time", [override("model.path", path / "model"), "model.config=null", *tokenizer]
    if not model_directory(config).is_dir():
        raise DataError(
            "The model that the run started from is gone.",
            where=str(model_directory(config)),
            fix=f"give a checkpoint: anytron replay {path} --checkpoint PATH",
        )
    return "the initial model", initial


def _lines(finding: Finding) -> list[str]:
    inspection = finding.inspection
    lines = [f"in the saved batch: {field}" for field in finding.data]
    lines += [f"in the weights: {name}" for name in inspection.weights]
    first = inspection.first
    if first is None:
        return [*lines, "in the passes: every number is finite"]
    lines.append(f"first in the passes: {first.value} in the {_where(first)}, {first.count} of {first.size} numbers")
    if finding.sequence is None:
        return [*lines, f"  micro-batch {first.micro_batch}"]
    place = f"sequence {finding.sequence} of the mini-batch, token {first.token} (id {finding.token_id})"
    return [*lines, f"  micro-batch {first.micro_batch}, {place}"]


def _where(first: NonFinite) -> str:
    if first.what == "loss":
        return "loss"
    if first.what in ("output", "gradient"):
        return f"{first.what} of {first.place}"
    return first.what.replace("its", f"{first.place}'s")


def _record(update: BadUpdate, finding: Finding, origin: str) -> dict[str, Any]:
    """Give what ``--json`` prints."""
    return {"update": asdict(update), "from": origin, **asdict(finding)}
