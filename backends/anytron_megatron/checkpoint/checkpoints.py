"""Save and load one engine's training state. Implements the methods of ``CheckpointEngine``."""

from __future__ import annotations

import json
import pickle
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.distributed.checkpoint.metadata import StorageMeta

from anytron.base.errors import EngineError
from anytron.base.files import exhausted, sync
from anytron.base.seeds import derive_seed
from anytron_megatron.checkpoint.progress import PROGRESS, ModelProgress, Progress
from anytron_megatron.checkpoint.reader import TABLE, load_tensors
from anytron_megatron.checkpoint.tensors import prepare_state, steps_done, trained_tensors
from anytron_megatron.checkpoint.unpickling import refusal
from anytron_megatron.checkpoint.writer import HostCopies, PartWriter, plan_writing, write_file
from anytron_megatron.training import parallel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from anytron.base.traits import ParallelSizes
    from anytron.device.runtime import DeviceRuntime
    from anytron.record.checkpoint.manifest import FileRecord
    from anytron_megatron.checkpoint.shards import SavedTensor
    from anytron_megatron.lora.adapters import Adapters
    from anytron_megatron.training.trained_model import TrainedModel

Value = TypeVar("Value")

FORMAT = "metadata.json"
"""The file by which Megatron recognises a ``torch_dist`` checkpoint."""

HOST, DEVICE, TRACKED = "host", "device", "tracked."
"""Keys of random states: torch's generator on the host, the device's generator, and the prefix of the named states of
Megatron's tracker. No key contains the device's type. The engine does not use Python's or NumPy's generators."""


class Checkpoints:
    """Saves and loads the training state of one engine on this rank.

    Args:
        models: Trained models by role: ``policy``, and ``critic`` if there is one.
        adapters: Adapters that are trained instead of the policy's weights; None = the weights are trained.
        runtime: The device.
        sizes: The parallel sizes.
        seed: ``trainer.seed``.
    """

    def __init__(
        self,
        models: Mapping[str, TrainedModel],
        adapters: Adapters | None,
        *,
        runtime: DeviceRuntime,
        sizes: ParallelSizes,
        seed: int,
    ) -> None:
        self._models = models
        self._adapters = adapters
        self._runtime = runtime
        self._layout = {**asdict(sizes), "device": runtime.device_type}
        self._seed = seed
        self._copies = HostCopies(runtime)
        self._writing: tuple[Path, PartWriter, Metadata | None] | None = None

    def save(self, directory: Path, *, asynchronous: bool) -> None:
        """Begin to save the training state; implements ``CheckpointEngine.save_checkpoint``."""
        self.close()
        _require_directory(directory)
        rank = dist.get_rank()
        plan = plan_writing(shard for one in self._tensors() for shard in one.shards)
        files = {_random_file(rank): save(_random_states(self._runtime))}
        progress = self._progress()
        if rank == 0:
            files[PROGRESS] = progress.to_json()
            files[FORMAT] = json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode()
        tensors = self._copies.of(plan.tensors) if asynchronous else plan.tensors
        writer = PartWriter(directory, f"__{rank}_0.distcp", tensors, files)
        self._writing = directory, writer, plan.table if rank == 0 else None
        if asynchronous:
            writer.start()
        else:
            writer.run()

    def written_files(self, *, wait: bool) -> Mapping[str, FileRecord] | None:
        """Return the files of the last save; None until every rank has written its files.

        Implements ``CheckpointEngine.written_files``.

        Raises:
            EngineError: No checkpoint is being written, or one could not be written.
        """
        if self._writing is None:
            raise EngineError(
                "No checkpoint is being written.", where="written_files", fix="call save_checkpoint() first"
            )
        directory, writer, table = self._writing
        if wait:
            writer.wait()
        _require_directory(directory)
        if not all(_gathered(writer.done())):
            return None
        self._writing = None
        _require_written(directory, writer.error)
        parts: list[dict[MetadataIndex, _StorageInfo]] | None = (
            [{} for _ in range(dist.get_world_size())] if table is not None else None
        )
        dist.gather_object(writer.stored, parts)
        records, error = writer.records, None
        if table is not None and parts is not None:
            # The table of contents comes last, when it is known where everything lies.
            table.storage_data = {index: place for part in parts for index, place in part.items()}
            table.storage_meta = StorageMeta()
            try:
                records = {**records, TABLE: write_file(directory / TABLE, pickle.dumps(table))}
                sync(directory)
            except OSError as failure:
                error = failure
        _require_written(directory, error)
        return records

    def load(self, directory: Path) -> None:
        """Restore a saved training state; implements ``CheckpointEngine.load_checkpoint``.

        Raises:
            EngineError: The checkpoint is damaged, or was saved by a run with another model or other roles.
        """
        progress = Progress.read(directory)
        for role, trained in self._models.items():
            if role not in progress.models:
                raise EngineError(
                    f"The checkpoint has no state of the {role}.",
                    where=str(directory),
                    why=f"it has the state of {', '.join(progress.models) or 'no model'}",
                    fix="resume with the configuration that the run began with",
                )
            prepare_state(trained.optimizer, progress.models[role].optimizer_steps)
        load_tensors(self._tensors(), directory)
        for role, trained in self._models.items():
            trained.continue_from(progress.models[role].updates, progress.models[role].schedule_steps)
        self._restore_random_states(directory, progress)

    def close(self) -> None:
        """Wait for the files of a save in progress; the save stays incomplete, without its table of contents."""
        if self._writing is not None:
            self._writing[1].wait()
            self._writing = None

    def _tensors(self) -> list[SavedTensor]:
        return [
            one
            for role, trained in self._models.items()
            for one in trained_tensors(role, trained, self._adapters if role == "policy" else None)
        ]

    def _progress(self) -> Progress:
        # A pipeline stage whose parameters are all frozen has an optimizer that never counts.
        steps = _gathered({role: steps_done(trained.optimizer) for role, trained in self._models.items()})
        models = {
            role: ModelProgress(trained.updates, trained.schedule_steps, max(counts[role] for counts in steps))
            for role, trained in self._models.items()
        }
        return Progress(self._layout, models)

    def _restore_random_states(self, directory: Path, progress: Progress) -> None:
        """Restore the random states if the parallel layout is the same; otherwise seed anew, with an unused seed."""
        if progress.layout != self._layout:
            parallel.seed_generators(derive_seed(self._seed, "another layout", progress.models["policy"].updates))
            return
        file = directory / _random_file(dist.get_rank())
        try:
            _set_random_states(load_file(file), self._runtime)
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
            raise exhausted(error, str(file)) or refusal(file, f"{type(error).__name__}: {error}") from error


def _require_directory(directory: Path) -> None:
    """Raise on this rank alone if the directory is gone. Not a collective: the other ranks may have ended."""
    if not directory.is_dir():
        raise EngineError(
            "The directory of the checkpoint is gone: this rank writes nothing.",
            where=str(directory),
            why="either the directory was deleted, or the run has started again without this rank while this rank was "
            "stopped or cut off from the network",
            fix="if the run has ended, start it again with resume=auto: it continues from the last complete checkpoint",
        )


def _require_written(directory: Path, error: BaseException | None) -> None:
    """Raise on every rank if writing failed on any. A collective."""
    reasons = _gathered(None if error is None else f"on {socket.gethostname()}: {type(error).__name__}: {error}")
    failed = [f"rank {rank} {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        raise EngineError(
            "The checkpoint could not be written.",
            where=str(directory),
            why="; ".join(failed),
            fix="solve what is named above (for a full disk: make room), and start the run again with resume=auto: it "
            "continues from the last complete checkpoint",
        )


def _gathered(value: Value) -> list[Value]:
    """Gather the values of all ranks on every rank. A collective."""
    values: list[Value] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _random_file(rank: int) -> str:
    """Return the name of the safetensors file with a rank's random states."""
    return f"random-{rank:05}.safetensors"


def _random_states(runtime: DeviceRuntime) -> dict[str, Tensor]:
    """Copy every random state of this rank, uint8 on the host."""
    tracked = {f"{TRACKED}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states = {HOST: torch.get_rng_state(), DEVICE: runtime.get_rng_state(), **tracked}
    return {name: state.detach().cpu().clone() for name, state in states.items()}


def _set_random_states(states: Mapping[str, Tensor], runtime: DeviceRuntime) -> None:
    """Set every random state of this rank."""
    torch.set_rng_state(states[HOST])
    runtime.set_rng_state(states[DEVICE])
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(TRACKED): state for name, state in states.items() if name.startswith(TRACKED)}
    )
