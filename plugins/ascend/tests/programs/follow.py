"""Follow recorded trajectories with engine after engine: ``follow.py PLAN OUTPUT``.

PLAN is a JSON file: the platform, its options, and for each engine a model directory and section overrides.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.config.algorithm import AlgorithmSection
from anytron.device.loading import open_session
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers
from anytron.sequences.batch import RaggedBatch
from anytron.workers.executor.local import LocalExecutor
from anytron.workers.executor.protocol import GroupSpec
from tests.backends.megatron.ranks import engine_config


def main(plan_file: str, output: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    recorded = torch.load(plan["recorded"], weights_only=False)
    loss = PolicyLoss(AlgorithmSection(kl_coefficient=0.05, entropy_coefficient=0.01))
    engine = plan["engines"][0][1].get("engine", {}).get("name")
    session = open_session(plan["platform"], plan["options"], engine)
    platform = {"name": plan["platform"], "options": plan["options"]}
    found, group = [], None
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(plan.get("logs", folder))
        executor = None
        for directory, sections in plan["engines"]:
            config = engine_config(Path(directory), logs, platform=platform, **sections)
            if executor is None:
                executor = LocalExecutor(config, session)
                group = executor.start(
                    GroupSpec(
                        "trainer",
                        "anytron.training_engines",
                        config.engine.name,
                        config.parallel.world_size,
                        num_threads=1,
                    )
                )
            else:
                group.rebuild(config)
            workers = TrainingWorkers.of(group)
            updates = UpdatePlan.from_config(config, workers.topology[0])
            log_probs = workers.score(recorded, updates, "policy")
            metrics = [workers.update(recorded, updates, loss) for _ in range(3)]
            workers.export_weights(str(Path(folder) / "weights.safetensors"))
            weights = load_file(Path(folder) / "weights.safetensors")
            found.append(
                {
                    **(_criticized(workers, recorded, updates) if config.critic else {}),
                    "log_probs": log_probs,
                    "grad_norms": [step["grad_norm"] for step in metrics],
                    "losses": [step["loss/policy"] for step in metrics],
                    "weights": weights,
                    "facts": workers.describe(),
                }
            )
        executor.close()
    torch.save(found, output)


def _criticized(workers: TrainingWorkers, recorded: RaggedBatch, updates: UpdatePlan) -> dict:
    """Three updates of the critic towards returns that are far from its values, and what it says then."""
    batch = workers.with_values(recorded, updates)
    batch = replace(batch, returns=torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3)))
    metrics = [workers.update_critic(batch, updates, ValueLoss()) for _ in range(3)]
    return {
        "critic_grad_norms": [step["critic/grad_norm"] for step in metrics],
        "values": workers.with_values(recorded, updates).values,
    }


main(*sys.argv[1:])
