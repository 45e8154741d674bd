"""Runs that stop at a checkpoint and go on from it, in the same layout or another, against runs that do not stop."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from anytron.algorithms.losses import ValueLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from anytron.record.checkpoint.manifest import FileRecord
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch

ADAM = {"name": "adam", "lr": 1e-2, "schedule": "cosine", "warmup_steps": 2}
BEFORE, AFTER = 2, 2
"""Updates before the checkpoint, and after it."""


@dataclass(frozen=True)
class Continued:
    """What the updates after a checkpoint give, and what they leave.

    Attributes:
        stopped: The weights at the checkpoint.
        metrics: Of each update, of policy and critic.
        weights: At the end; a critic's trunk and head and an adapter below names of their own.
    """

    stopped: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what the run that wrote it did afterwards."""

    path: Path
    files: Mapping[str, FileRecord]
    continued: Continued


@dataclass(frozen=True)
class Run:
    """An engine on real ranks and the recorded trajectories."""

    workers: TrainingWorkers
    updates: Any
    folder: Path
    batch: RaggedBatch
    loss: Any
    critic: bool
    lora: bool

    def do(self, count: int) -> list[dict[str, float]]:
        """Update policy and critic so many times."""
        found = []
        for _ in range(count):
            metrics = self.workers.update(self.batch, self.updates, self.loss)
            if self.critic:
                batch = self.workers.with_values(self.batch, self.updates)
                noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
                metrics |= self.workers.update_critic(replace(batch, returns=noise), self.updates, ValueLoss())
            found.append(metrics)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Everything that the engine can write for others."""
        self.workers.export_weights(str(self.folder / "policy.safetensors"))
        found = load_file(self.folder / "policy.safetensors")
        if self.critic:
            self.workers.save_critic(str(self.folder / "critic"))
            for file in sorted((self.folder / "critic").glob("*.safetensors")):
                found |= {f"critic.{name}": tensor for name, tensor in load_file(file).items()}
        if self.lora:
            self.workers.save_adapter(str(self.folder / "adapter"))
            found |= load_file(self.folder / "adapter" / "adapter_model.safetensors")
        return found

    def go_on(self) -> Continued:
        """Do the updates after the checkpoint."""
        stopped = self.weights()
        return Continued(stopped, self.do(AFTER), self.weights())


@pytest.fixture(scope="session")
def run(start_engine, recorded, policy_loss):
    """A context manager: an engine, ready to be trained."""

    def start(batch=recorded, **sections) -> Any:
        sections = {"optimizer": ADAM, "trainer": {"total_steps": 10}, **copy.deepcopy(sections)}
        critic, lora = "critic" in sections, "lora" in sections.get("model", {})
        if critic:
            sections = {"algorithm": {"advantage": "gae"}, **sections}
        return _entered(start_engine(**sections), batch, policy_loss, critic, lora)

    return start


def _entered(context: Any, batch: Any, loss: Any, critic: bool, lora: bool) -> Run:
    workers, updates, folder = context.__enter__()
    return Run(workers, updates, folder, batch, loss, critic, lora)


@pytest.fixture(scope="session")
def save(run, tmp_path_factory) -> Callable[..., Saved]:
    """Train, save a checkpoint while training goes on, and train on."""

    def train(**sections) -> Saved:
        path = tmp_path_factory.mktemp("checkpoint")
        engine = run(**sections)
        engine.do(BEFORE)
        stopped = engine.weights()
        engine.workers.save_checkpoint(str(path), asynchronous=True)
        metrics = engine.do(AFTER)
        files = engine.workers.written_files(wait=True)
        return Saved(path, files, Continued(stopped, metrics, engine.weights()))

    return train


@pytest.fixture(scope="session")
def resume(run) -> Callable[..., Continued]:
    """Go on from a checkpoint with an engine of its own."""

    def train(path: Path, **sections) -> Continued:
        engine = run(**sections)
        engine.workers.load_checkpoint(str(path))
        return engine.go_on()

    return train
