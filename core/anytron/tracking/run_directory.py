"""The directory of a run: what lies where, and who may overwrite it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from anytron.config.dump import to_yaml
from anytron.errors import ConfigError
from anytron.tracking.album import Album
from anytron.tracking.sinks import JsonlSink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.rewards.sample import Sample

CONTENTS = (
    "config.yaml",
    "patches.json",
    "metrics.jsonl",
    "samples.jsonl",
    "images",
    "plots",
    "hf",
    "adapter",
    "critic",
    "initial_model",
)
"""What a run leaves; ``trainer.overwrite`` deletes these and nothing else."""


class RunDirectory:
    """Writes a run's files. A context manager: leaving closes them.

    ==================  ====================================================================
    ``config.yaml``     the configuration as resolved, defaults included, paths absolute
    ``patches.json``    facts of each worker: device, patches, which plugin supplied which kernel
    ``metrics.jsonl``   one line per step
    ``samples.jsonl``   some samples of each step; all of them if their rewards failed
    ``images/``         the pictures of those samples, small, by the names that stand there
    ``plots/``          ``reward.png``
    ``hf/``             the trained model with its tokenizer and image processor
    ``adapter/``        with ``model.lora``: the trained adapters, in PEFT's format
    ``critic/``         with ``critic``: its trunk as a model directory, and ``value_head.safetensors``
    ``initial_model/``  the random model that the run started from (``model.config`` only)
    ==================  ====================================================================
    """

    def __init__(self, path: Path, log_samples: int) -> None:
        self.path = path
        self._log_samples = log_samples
        self._metrics = JsonlSink(path / "metrics.jsonl")
        self._samples = JsonlSink(path / "samples.jsonl")

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Claim ``trainer.output_dir`` and write ``config.yaml``.

        Raises:
            ConfigError: An earlier run is there and ``trainer.overwrite`` is off, or the directory
                cannot be made. (A run that failed before its first samples is not in the way.)
        """
        path = Path(config.trainer.output_dir).absolute()
        present = [name for name in CONTENTS if (path / name).exists()]
        if present and not config.trainer.overwrite and not _never_started(path):
            raise ConfigError(
                "The output directory holds an earlier run.",
                where=f"trainer.output_dir = {path}",
                why=f"it has {', '.join(present)}",
                fix="set another trainer.output_dir, or trainer.overwrite=true to delete that run",
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in present:
                old = path / name
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            (path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            return cls(path, config.trainer.log_samples)
        except OSError as error:
            raise ConfigError(
                "The output directory cannot be written.", where=f"trainer.output_dir = {path}", why=str(error)
            ) from error

    def write_patches(self, workers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Record what each worker says of itself, by role and rank."""
        text = json.dumps(workers, indent=2, default=str)
        (self.path / "patches.json").write_text(text + "\n", encoding="utf-8")

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics."""
        self._metrics.write(metrics)

    def write_samples(self, step: int, samples: Sequence[Sample], rewards: Tensor | None) -> None:
        """Append ``trainer.log_samples`` samples, spread over the step's prompts.

        Args:
            step: The step.
            samples: All samples of the step.
            rewards: float32 ``[len(samples)]``; None = they failed, and every sample is kept.
        """
        count = len(samples) if rewards is None else min(self._log_samples, len(samples))
        album = Album(self.path, step)
        for index in (position * len(samples) // count for position in range(count)):
            sample = samples[index]
            self._samples.write(
                {
                    "step": step,
                    "prompt_id": sample.prompt_id,
                    "prompt": sample.prompt_text,
                    **({"images": album.add(sample.images)} if sample.images else {}),
                    "response": sample.response_text,
                    "response_tokens": sample.response_tokens,
                    "finished": sample.finished,
                    "reward": None if rewards is None else rewards[index].item(),
                }
            )

    def plot(self) -> None:
        """Draw ``plots/reward.png`` from ``metrics.jsonl``."""
        from anytron.tracking.plot import plot_reward

        plot_reward(self.path / "metrics.jsonl", self.path / "plots" / "reward.png")

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _never_started(path: Path) -> bool:
    """Whether all that lies there is the beginning of a run that failed before its first samples."""
    logs = [path / "metrics.jsonl", path / "samples.jsonl"]
    return all(log.is_file() and log.stat().st_size == 0 for log in logs) and not (path / "hf").exists()
