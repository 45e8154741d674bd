"""The model that a path of ``anytron chat`` or ``serve`` stands for, and the model that its run began with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from anytron.base.errors import CheckpointError, ConfigError
from anytron.cli.single_rank import checkpoint_config, override, write_model
from anytron.config.load import load_config
from anytron.record.checkpoint.directory import BEST, CHECKPOINTS, CheckpointDirectory, locate
from anytron.record.checkpoint.manifest import MANIFEST
from anytron.task.data.model_files import CONFIG_FILE, read_config
from anytron.task.data.pretrained import directory_diagnostics
from anytron.task.data.weight_headers import DamagedFileError, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.directory import Checkpoint

CONFIG, EXPORTED, INITIAL = "config.yaml", "hf", "initial_model"
"""Names, in a run's directory, of its configuration, its trained model and the model that it made at its start."""


@dataclass(frozen=True)
class FoundModel:
    """A model directory, or a checkpoint from which one can be written.

    Attributes:
        place: The model directory or the checkpoint.
        checkpoint: The checkpoint; None for a model directory.
        config: Configuration of the run that made the model; None if no run is known.
        run: Directory of that run; None if it is not known.
    """

    place: Path
    checkpoint: Checkpoint | None = None
    config: RunConfig | None = None
    run: Path | None = None

    def check(self) -> None:
        """Check the files as far as possible without starting an engine.

        Raises:
            AnytronError: Files are missing, malformed or cut short.
        """
        if self.checkpoint is None:
            check_directory(self.place)
        else:
            self.checkpoint.verify()

    def directory(self, new: Path, overrides: Sequence[str], command: str, tell: Callable[[str], None]) -> Path:
        """Return the model directory; if this is a checkpoint, write one from it first.

        Args:
            new: Directory to write if this is a checkpoint; it must not exist.
            overrides: Changes of the run's configuration.
            command: The command line that an error tells the user to repeat.
            tell: Receives a line about each thing that is done.

        Raises:
            AnytronError: The run cannot be set up here.
        """
        if self.checkpoint is None:
            return self.place
        tell(f"writing the model of the checkpoint {self.place}")
        write_model(self.checkpoint, new, [*self._trusted(), *overrides], command, tell)
        return new

    def _trusted(self) -> list[str]:
        """Functions that the run's own config.yaml names: unlike a checkpoint, that file is trusted (SECURITY.md)."""
        if self.run is None or self.config is None:
            return []
        named = {"model.tokenizer": self.config.model.tokenizer, "model.processor": self.config.model.processor}
        return [override(key, value) for key, value in named.items() if value is not None and ":" in value]


def find_model(path: Path, command: str = "anytron chat") -> FoundModel:
    """Find the model that a path stands for. Nothing is loaded.

    Args:
        path: A model directory; the directory of a run (its ``hf`` is taken if it exists, else its newest checkpoint);
            a directory of checkpoints (the newest is taken); a checkpoint; or the file ``best``.
        command: The command that an error tells the user to type.

    Raises:
        AnytronError: The path is none of these, or the run has saved no model.
    """
    if (path / CONFIG_FILE).is_file():
        return FoundModel(path.absolute())
    if (path / CONFIG).is_file():
        return _model_of_run(path.absolute())
    if path.name == BEST or (path / MANIFEST).is_file() or any(path.glob("step-*")):
        checkpoint = locate(path)
        return FoundModel(checkpoint.path, checkpoint, checkpoint_config(checkpoint))
    raise _nothing(path, command)


def find_beginning(found: FoundModel, path: Path, overrides: Sequence[str]) -> FoundModel:
    """Find the model that a run began with.

    Args:
        found: The trained model.
        path: The path that the user gave, for errors.
        overrides: The user's overrides; ``model.path`` says where the initial model is if it was moved.

    Raises:
        AnytronError: The run is not known, or its initial model does not exist.
    """
    config = found.config
    if config is None:
        command = f"anytron chat {quote(str(found.place.parent))}"
        inside = found.place.name == EXPORTED and (found.place.parent / CONFIG).is_file()
        raise ConfigError(
            "The model that the run began with is not known.",
            where=str(path),
            why="this is a model directory, which does not record the run that made it",
            fix=f"give the run's directory: {command} --compare"
            if inside
            else "give the directory of a run: anytron chat RUN --compare",
        )
    moved = [value for key, _, value in (one.partition("=") for one in overrides) if key == "model.path"]
    if not moved and config.resume not in ("never", "auto"):
        checkpoint = locate(Path(config.resume))
        return FoundModel(checkpoint.path, checkpoint, checkpoint_config(checkpoint))
    start = Path(moved[-1].strip("\"'")) if moved else _beginning(config, found)
    if not start.is_dir():
        raise ConfigError(
            "The run's initial model does not exist.",
            where=str(start),
            why="no such directory",
            fix="restore the directory; if it was moved, add model.path=DIRECTORY",
        )
    return FoundModel(start.absolute())


def _beginning(config: RunConfig, found: FoundModel) -> Path:
    """Find where the run's model started from, also if the run's directory was moved."""
    if config.model.path is not None:
        return Path(config.model.path)
    run = found.run
    if run is None and found.checkpoint is not None and found.place.parent.name == CHECKPOINTS:
        run = found.place.parent.parent
    if run is not None and (run / INITIAL).is_dir():
        return run / INITIAL
    return Path(config.trainer.output_dir) / INITIAL


def _model_of_run(run: Path) -> FoundModel:
    config = load_config(run / CONFIG)
    if (run / EXPORTED / CONFIG_FILE).is_file():
        return FoundModel(run / EXPORTED, None, config, run)
    elsewhere = config.checkpoint.path  # not that of trainer.output_dir: the run's directory may be a copy
    if complete := CheckpointDirectory(run / CHECKPOINTS if elsewhere is None else Path(elsewhere)).complete():
        newest = complete[-1]
        return FoundModel(newest.path, newest, checkpoint_config(newest), run)
    raise CheckpointError(
        "The run has not saved a model yet.",
        where=str(run),
        why=f"there is neither {EXPORTED}/, which is written after the last step, nor a complete checkpoint",
        fix="wait for the run's first checkpoint (checkpoint.every_steps, checkpoint.every_minutes); if the run was "
        "interrupted, continue it with resume=auto and checkpoint.keep=1; if it has ended, train it again with "
        "trainer.overwrite=true and checkpoint.keep=1",
    )


def _nothing(path: Path, command: str) -> ConfigError:
    what = "No usable model was found at this path."
    if not path.exists():
        fix = "give the directory of a run or of a Hugging Face model, for example one made by 'hf download'"
        return ConfigError(what, where=str(path), why="no such file or directory", fix=fix)
    if not path.is_dir():
        fix = "give the directory of a run, of a Hugging Face model or of a checkpoint"
        why = "it is a file, and the only file that can be given is checkpoints/best of a run"
        return ConfigError(what, where=str(path), why=why, fix=fix)
    if (path / "adapter_config.json").is_file():
        fix = (
            f"give the run's directory: {command} {quote(str(path.parent))}"
            if (path.parent / CONFIG).is_file()
            else "give the directory of the run"
        )
        why = "it holds LoRA adapters without the base model that they belong to"
        return ConfigError(what, where=str(path), why=why, fix=fix)
    runs = sorted(path.glob(f"*/{CONFIG}"), key=lambda file: file.stat().st_mtime)
    if runs:
        why = f"it is not a run, but a directory of runs: {', '.join(sorted(file.parent.name for file in runs))}"
        return ConfigError(what, where=str(path), why=why, fix=f"choose a run: {command} {quote(str(runs[-1].parent))}")
    why = f"it has neither {CONFIG_FILE} (a model) nor {CONFIG} (a run) nor {MANIFEST} (a checkpoint)"
    fix = "give the directory of a run, of a Hugging Face model or of a checkpoint"
    return ConfigError(what, where=str(path), why=why, fix=fix)


def check_directory(directory: Path) -> None:
    """Check that a model directory has valid JSON files, and safetensors files that are not cut short.

    Raises:
        ConfigError: A file is missing, malformed or cut short.
    """
    if mistakes := list(directory_diagnostics("", directory, "complete the download")):
        raise ConfigError(
            "The model directory cannot be used.",
            where=str(directory),
            why="; ".join(one.message for one in mistakes),
            fix="; ".join(dict.fromkeys(one.fix for one in mistakes)),
        )
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        names = ", ".join(sorted(file.name for file in directory.glob("pytorch_model*")))
        raise ConfigError(
            "The model directory has no safetensors file.",
            where=str(directory),
            why=f"weights are read only from safetensors files, and the directory has {names}",
            fix="load the model with transformers, and write it to another directory with save_pretrained",
        )
    for file in files:
        try:
            read_header(file)
        except DamagedFileError as error:  # noqa: PERF203 - the error names the file
            fix = "copy or download the file again"
            raise ConfigError("A file of weights cannot be read.", where=str(file), why=str(error), fix=fix) from error


def check_tokenizer(directory: Path, overrides: Sequence[str], command: str = "anytron chat") -> None:
    """Check that a model directory has a tokenizer, or that the user has set one.

    Args:
        directory: The directory.
        overrides: The user's overrides.
        command: The command that an error tells the user to type.

    Raises:
        ConfigError: The directory has no tokenizer and the user has set none: transformers would make an empty one.
    """
    if not any(directory.glob("tokenizer*")) and not any(one.startswith("model.tokenizer=") for one in overrides):
        raise ConfigError(
            "The model directory has no tokenizer.",
            where=str(directory),
            why="no file in it is named tokenizer*",
            fix=f"set a tokenizer: {command} {quote(str(directory))} model.tokenizer=DIRECTORY",
        )


def context_length(directory: Path) -> int | None:
    """Read how many tokens a model can see, from its ``config.json``; None if the file does not say.

    Raises:
        ConfigError: ``config.json`` is missing or malformed.
    """
    fields = _fields(directory)
    length = fields.get("max_position_embeddings", fields.get("n_positions"))
    return length if isinstance(length, int) else None


def stored_dtype(directory: Path) -> str:
    """Return the dtype to compute a model in if its run is not known: bfloat16 for 16-bit weights, else float32.

    Raises:
        ConfigError: ``config.json`` is missing or malformed.
    """
    fields = _fields(directory)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return "bfloat16" if dtype in ("bfloat16", "float16") else "float32"


def takes_images(directory: Path) -> bool:
    """Whether the model of a directory has a vision tower.

    Raises:
        ConfigError: ``config.json`` is missing or malformed.
    """
    return "vision_config" in read_config(directory)


def _fields(directory: Path) -> dict[str, Any]:
    """The fields of the language model, before those of the whole."""
    whole = read_config(directory)
    return {**whole, **(whole.get("text_config") or {})}
