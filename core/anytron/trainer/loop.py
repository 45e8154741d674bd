"""The RL loop."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.algorithms.registered import load_loss, with_advantages
from anytron.algorithms.value_loss import ValueLoss
from anytron.data.pretrained import save_processor
from anytron.engines.protocol import PromptInputs
from anytron.errors import DataError
from anytron.preflight.prepare import prepare
from anytron.seeds import derive_seed
from anytron.tracking.clock import Clock
from anytron.tracking.run_directory import RunDirectory
from anytron.trainer.initial_model import write_random_model
from anytron.trainer.metrics import check_agreement, step_metrics
from anytron.trainer.trajectories import assemble, make_samples
from anytron.trainer.updates import UpdatePlan
from anytron.trainer.workers import kernel_suppliers, start_workers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.schema import RunConfig
    from anytron.executor.protocol import Executor
    from anytron.tracking.progress import Progress


@dataclass(frozen=True)
class RunSummary:
    """What a finished run says of itself.

    Attributes:
        output_dir: Where its files lie.
        steps: Training steps done.
        metrics: Those of the last step.
        seconds: Wall-clock time of the training steps, without start-up and saving.
    """

    output_dir: Path
    steps: int
    metrics: Mapping[str, float]
    seconds: float


def train(config: RunConfig, executor: Executor, progress: Progress) -> RunSummary:
    """Train a policy by reinforcement learning.

    Everything that can be wrong with configuration and data is found before a worker starts.
    Metrics and samples are on disk as soon as they are known; an error loses nothing of them.

    Args:
        config: The run, complete: paths absolute, edits of plugins applied, and checked
            (:func:`anytron.preflight.open_run.open_run`).
        executor: Starts the workers; the caller closes it.
        progress: Is told of every step.

    Raises:
        ConfigError: The configuration names something impossible or missing.
        DataError: Prompts, responses or rewards are not usable.
        EngineError: An engine cannot do what was asked, or the two engines disagree.
        WorkerError: A worker process failed.
    """
    prepared = prepare(config)
    loss = load_loss(config.algorithm)
    critic, warm_up = config.critic, config.trainer.total_steps - config.policy_steps
    value_loss = None if critic is None else ValueLoss(critic.clip_value)
    seed, steps = config.trainer.seed, config.trainer.total_steps

    with RunDirectory.create(config) as run, tempfile.TemporaryDirectory(prefix="anytron-weights-") as exchange:
        write_random_model(config, prepared.tokenizer)
        trainer, rollout = start_workers(executor, config)
        updates = UpdatePlan.from_config(config, trainer.topology[0])
        facts = trainer.describe()
        run.write_patches({"trainer": facts, "rollout": rollout.describe()})
        progress.start(steps, [str(rank["device"]) for rank in facts], kernel_suppliers(facts))
        began = time.perf_counter()

        for step in range(1, steps + 1):
            clock = Clock()
            with clock.measure("sync"):  # also before the first rollout: the training engine has the only weights
                rollout.load_weights(trainer.export_weights(str(Path(exchange) / "policy.safetensors")))

            with clock.measure("rollout"):
                prompts = prepared.draw(config.data.prompts_per_step)
                inputs = [PromptInputs(prompt.tokens, prompt.patches) for prompt in prompts]
                responses = rollout.generate(inputs, prepared.sampling, derive_seed(seed, "rollout", step))
            samples = make_samples(prompts, responses, config.rollout.samples_per_prompt, prepared.tokenizer)

            with clock.measure("reward"):
                try:
                    rewards = prepared.rewards(samples)
                except DataError:
                    run.write_samples(step, samples, rewards=None)
                    raise
            run.write_samples(step, samples, rewards.total)

            with clock.measure("score"):
                batch = assemble(samples, config.rollout.temperature)
                if critic is not None:
                    batch = trainer.with_values(batch, updates)
                if step > warm_up:
                    batch = trainer.with_scores(batch, updates, reference=config.algorithm.kl_coefficient > 0.0)
                batch = with_advantages(batch, rewards.total, config.rollout.samples_per_prompt, config.algorithm)

            with clock.measure("update"):
                outcomes = []
                for mini_batch in updates.mini_batches(batch, derive_seed(seed, "mini-batches", step)):
                    outcome = {} if value_loss is None else trainer.update_critic(mini_batch, updates, value_loss)
                    if step > warm_up:
                        outcome |= trainer.update(mini_batch, updates, loss)
                    outcomes.append(outcome)

            metrics = step_metrics(step, samples, rewards, config.rollout.samples_per_prompt, batch, outcomes, clock)
            run.write_metrics(metrics)
            progress.step(metrics)
            if step > warm_up:  # before, no log-probs are computed
                check_agreement(metrics, config.trainer.rollout_log_prob_tolerance)

        seconds = time.perf_counter() - began
        progress.finish()
        if config.trainer.save_hf:
            trainer.save_hf(str(run.path / "hf"))
            prepared.tokenizer.save_pretrained(str(run.path / "hf"))
            save_processor(config.model, run.path / "hf")
            if config.model.lora is not None:
                trainer.save_adapter(str(run.path / "adapter"))
            if critic is not None:
                trainer.save_critic(str(run.path / "critic"))
                prepared.tokenizer.save_pretrained(str(run.path / "critic"))
        if config.tracking.plot:
            run.plot()
        return RunSummary(run.path, steps, metrics, seconds)
