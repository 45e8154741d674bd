"""A mini-batch whose update gave NaN or infinity, on disk: everything that doing the update again needs.

==================== ===================================================================================
``batch.safetensors`` the tensors of the :class:`~anytron.sequences.batch.RaggedBatch`; images as ``images.N.FIELD``
``batch.json``        where it comes from, and what the update reported
``config.yaml``       the run's configuration, with the KL coefficient of the step; the loss follows from it
``model/``            the weights that were to be updated, if the run stopped (or ``adapter/``, ``critic/``)
==================== ===================================================================================
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from anytron.base.errors import DataError
from anytron.base.files import PRIVATE, exhausted, remove, write_durably
from anytron.config.dump import to_yaml
from anytron.config.json_files import read_object
from anytron.sequences.batch import RaggedBatch
from anytron.task.data.images import ImagePatches

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.training_engine import UpdatedModel

TENSORS, RECORD, CONFIG = "batch.safetensors", "batch.json", "config.yaml"
FORMAT = 1


@dataclass(frozen=True)
class BadUpdate:
    """Where a bad mini-batch comes from.

    Attributes:
        step: Training step, from 1.
        update: Update of that step, from 1.
        model: Which model was to be updated.
        dp_size: Data-parallel replicas among which the mini-batch was divided.
        micro_batch_multiple: As in :class:`~anytron.workers.engines.training_engine.Topology`.
        temperature: The batch's.
        metrics: What the update reported.
    """

    step: int
    update: int
    model: UpdatedModel
    dp_size: int
    micro_batch_multiple: int
    temperature: float
    metrics: Mapping[str, float]

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"step-{self.step:06d}-update-{self.update}" + ("-critic" if self.model == "critic" else "")


def write_bad_batch(directory: Path, update: BadUpdate, batch: RaggedBatch, config: RunConfig) -> None:
    """Write a mini-batch into a directory of its own; what an earlier run of the same step has left there goes."""
    tensors = {field.name: value for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)}
    for index, patches in enumerate(batch.images or ()):
        if patches is not None:
            tensors |= {f"images.{index}.{name}": value for name, value in vars(patches).items()}
    remove(directory)
    directory.mkdir(parents=True)
    # safetensors refuses tensors that share memory, as a batch's may.
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / TENSORS)
    write_durably(directory / CONFIG, to_yaml(config), PRIVATE)  # it may hold secrets
    record = {"format": FORMAT, "has_images": batch.images is not None, **asdict(update)}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_bad_batch(directory: Path) -> tuple[BadUpdate, RaggedBatch]:
    """Read what :func:`write_bad_batch` wrote.

    Raises:
        DataError: The directory holds something else.
    """
    try:
        record = read_object(directory / RECORD)
        tensors: dict[str, Any] = load_file(directory / TENSORS)
        if record.pop("format") != FORMAT:
            raise _unreadable(directory, f"it is of another format than {FORMAT}, which this version reads")
        has_images = record.pop("has_images")
        update = BadUpdate(**record)
        images = _images(tensors, tensors["lengths"].numel()) if has_images else None
        batch = RaggedBatch(temperature=update.temperature, images=images, **tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise exhausted(error, str(directory)) or _unreadable(directory, f"{type(error).__name__}: {error}") from error
    return update, batch


def _images(tensors: dict[str, Tensor], sequences: int) -> tuple[ImagePatches | None, ...]:
    """Take the images out of the tensors."""
    names = [field.name for field in fields(ImagePatches)]
    found = [
        {name: tensors.pop(f"images.{index}.{name}") for name in names if f"images.{index}.{name}" in tensors}
        for index in range(sequences)
    ]
    return tuple(ImagePatches(**patches) if patches else None for patches in found)


def _unreadable(directory: Path, why: str) -> DataError:
    return DataError(
        "This is no saved mini-batch.",
        where=str(directory),
        why=why,
        fix="give a directory below bad_batches/ in a run's directory",
    )
