"""Runs of tiny mixtures of experts with everything on: auxiliary losses, router replay, weights that move."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

if TYPE_CHECKING:
    import torch

    from anytron.sequences.batch import RaggedBatch

ONE_SEQUENCE = 1
"""Tokens of a micro-batch in updates: each sequence gets its own, so that every division of the work has the same
micro-batches, and auxiliary losses, which are not linear, the same values."""
LARGER = 40
"""Tokens of a micro-batch where routing is recorded: other micro-batches than in the updates."""
OPTIONS = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01}


@dataclass(frozen=True)
class Run:
    """What a run leaves.

    Attributes:
        batch: The trajectories with old log-probs and recorded routing.
        metrics: Of each update.
        weights: After each update, exported.
        routing: How the last weights would route.
    """

    batch: RaggedBatch
    metrics: list[dict[str, float]]
    weights: list[dict[str, torch.Tensor]]
    routing: torch.Tensor


@pytest.fixture(scope="session")
def train(start_engine, recorded, policy_loss, tiny_family):
    """Record routing and old log-probs of the trajectories, then do three updates on them."""

    def run(family="qwen3_moe", batch=recorded, steps=3, options=None, transformer=OPTIONS, **sections) -> Run:
        engine = {
            "max_tokens_per_micro_batch": ONE_SEQUENCE,
            "distributed_optimizer": False,
            "options": {"router_replay": "old-log-probs", "transformer": transformer, **(options or {})},
        } | sections.pop("engine", {})
        with start_engine(model={"path": str(tiny_family(family))}, engine=engine, **sections) as (
            workers,
            updates,
            output,
        ):
            assert updates.needs_old_log_probs
            scored = workers.with_scores(batch, dataclasses.replace(updates, max_tokens=LARGER), reference=False)
            metrics, weights = [], []
            for step in range(steps):
                metrics.append(workers.update(scored, updates, policy_loss))
                path = output / f"{step}.safetensors"
                workers.export_weights(str(path))
                weights.append(load_file(path))
            routing = workers.token_outputs(batch, updates, "policy").routing
        return Run(scored, metrics, weights, routing)

    return run


@pytest.fixture(scope="session")
def one_rank(train) -> Run:
    return train()


@pytest.fixture
def extension(tmp_path_factory, monkeypatch):
    """Install an extension for worker processes: the lines of its class's body.

    The same lines are installed from the same folder, so that tests with the same extension share processes.
    """

    def install(*lines):
        body = "".join(f"    {line}\n" for line in lines)
        source = (
            "from anytron import hookimpl\n"
            "from anytron.sequences.masks import AttnMask, MaskKind\n"
            "from anytron.device.patches import Patch, Phase\n"
            "from anytron.sequences.layout import LayoutConstraints\n"
            f"class Meddler:\n    name = 'meddler'\n{body}"
        )
        folder = tmp_path_factory.getbasetemp() / f"meddler-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
        metadata = folder / "meddler-1.0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (folder / "meddler.py").write_text(source)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: meddler\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[anytron.plugins]\nmeddler = meddler:Meddler\n")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.syspath_prepend(str(folder))

    return install
