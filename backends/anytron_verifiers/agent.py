"""Environments of verifiers from 0.4 on: each response is one episode, whose program reaches the model over HTTP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.tasks import AgentResult
from anytron_verifiers.tasksets import load_taskset_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.tasks import AgentTask

KEY = "VERIFIERS_SESSION_API_KEY"
"""Variable from which verifiers reads the session's key. Its local runtime keeps names with API_KEY from programs."""


async def solve(task: AgentTask, name: str, args: Mapping[str, Any] | None = None) -> AgentResult:
    """Run one episode of a row of a taskset, and return what the taskset gives for it.

    Prompts must come from :func:`anytron_verifiers.prompts` with the same options.

    Args:
        task: The task; its data are the row.
        name: Name of the taskset, as for ``eval`` of verifiers.
        args: Configuration of the environment, the block ``env`` of verifiers' own configurations.

    Returns:
        The reward, and as metrics the taskset's metrics, the score of each reward function, ``num_turns`` and
        ``is_truncated``.

    Raises:
        ConfigError: No supported verifiers is installed, or the environment cannot be loaded.
        RuntimeError: The episode ended with an error.
        ValueError: The number of agents in the episode that are trained is not one.
    """
    environment = load_taskset_environment(name, args or {}, task.max_turns)
    import verifiers.v1 as vf

    os.environ[KEY] = task.api_key
    client = vf.EvalClientConfig(base_url=task.base_url, api_key_var=KEY)
    kind = type(environment.taskset).task_type()
    row = kind(kind.data_type().model_validate(dict(task.data)), environment.config.taskset.task)
    async with environment.serving():
        (slot,) = environment.slots(row)
        episode = await environment.run_slot(slot, vf.ModelContext(model=task.model, client=client))
    return _result(episode)


def _result(episode: Any) -> AgentResult:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        found = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(f"the episode ended with an error: {found or 'it was not completed'}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise ValueError(f"the episode has {len(trained)} agents that are trained, but must have exactly one")
    (trace,) = trained
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: number for name, number in trace.metrics.items() if number is not None}
    counted = {"num_turns": trace.num_turns, "is_truncated": float(trace.is_truncated)}
    return AgentResult(trace.reward, {**scores, **metrics, **counted})
