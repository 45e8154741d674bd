"""Tiny models on disk, recorded trajectories, and real ranks of the Megatron engine."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import anytron_conformance.recorded as recorded_trajectories
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.config.algorithm import AlgorithmSection
from anytron.run.trainer.updates import UpdatePlan
from anytron_conformance.recorded import VOCABULARY
from anytron_conformance.tiny_models import write_tiny_model
from tests.backends.megatron.families.published import PUBLISHED, write_published_model
from tests.backends.megatron.ranks import Ranks, install_extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from anytron.sequences.batch import RaggedBatch


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():  # norms of 1 would hide a norm that is applied in the wrong place
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory) -> Callable[[str], Path]:
    """Give the directory of a tiny model: of one of the kit's families, or with a published configuration."""

    @functools.cache
    def write(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        return write_published_model(family, directory) if family in PUBLISHED else write_tiny_model(family, directory)

    return write


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    """Processes that build engine after engine (:mod:`tests.backends.megatron.ranks`)."""
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def recorded() -> RaggedBatch:
    return recorded_trajectories.recorded()


@pytest.fixture(scope="session")
def recorded_images() -> RaggedBatch:
    return recorded_trajectories.recorded_images()


@pytest.fixture(scope="session")
def policy_loss() -> PolicyLoss:
    return PolicyLoss(AlgorithmSection(kl_coefficient=0.05, entropy_coefficient=0.01))


@dataclass(frozen=True)
class Trajectory:
    """What a few updates on recorded trajectories leave: enough to tell two computations apart."""

    log_probs: torch.Tensor
    grad_norms: list[float]
    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def start_engine(tiny_model, ranks, tmp_path_factory):
    """A context manager: an engine on real ranks, configured by section overrides, and a directory."""

    @contextlib.contextmanager
    def start(**sections):
        workers, config = ranks.engine(tiny_model, **sections)
        yield workers, UpdatePlan.from_config(config, workers.topology[0]), tmp_path_factory.mktemp("run")

    return start


@pytest.fixture(scope="session")
def follow(tiny_model, recorded, policy_loss, ranks, tmp_path_factory):
    """Score trajectories (the recorded ones, unless others are given) and do three updates on them."""
    file = tmp_path_factory.mktemp("follow") / "after.safetensors"

    def run(batch: RaggedBatch = recorded, **sections) -> Trajectory:
        workers, config = ranks.engine(tiny_model, **sections)
        updates = UpdatePlan.from_config(config, workers.topology[0])
        log_probs = workers.score(batch, updates, "policy")
        metrics = [workers.update(batch, updates, policy_loss) for _ in range(3)]
        workers.export_weights(str(file))
        return Trajectory(
            log_probs=log_probs,
            grad_norms=[step["grad_norm"] for step in metrics],
            losses=[step["loss/policy"] for step in metrics],
            weights=load_file(file),
        )

    return run


@pytest.fixture
def install_plugin(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Install an extension for one test (:func:`install_extension`)."""
    return lambda source: install_extension(source, tmp_path / "installed", monkeypatch)


@pytest.fixture
def write_extension(install_plugin) -> Callable[[str, str], None]:
    """Install an extension whose one patch replaces a function: a saboteur."""

    def write(target: str, replacement: str) -> None:
        install_plugin(
            "from anytron import hookimpl\n"
            "from anytron.device.patches import Patch, Phase\n"
            "class Plugin:\n"
            "    name = 'sabotage'\n"
            "    @hookimpl\n"
            "    def patch_model(self, phase):\n"
            "        if phase is not Phase.BEFORE_BUILD:\n"
            "            return []\n"
            "        return [Patch(id='sabotage.one', owner='sabotage', phase=phase,\n"
            f"                      target={target!r}, reason='a test of the test',\n"
            "                      replacement='installed_plugin:replacement')]\n"
            f"replacement = {replacement}\n"
        )

    return write
