"""Tasksets of verifiers from 0.4 on: their rows as prompts, and the environments that run them."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.task.data import Prompt
from anytron_verifiers.messages import plain
from anytron_verifiers.release import EPISODES, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def rows(name: str, args: Mapping[str, Any], count: int) -> Iterator[Prompt]:
    """Return the rows of a taskset.

    Args:
        name: Name of the taskset, as for ``eval`` of verifiers.
        args: Configuration of the environment, the block ``env`` of verifiers' own configurations.
        count: Number of rows, from the first; -1 = all.

    Raises:
        ConfigError: The environment cannot be loaded, or all rows of a taskset without an end are asked for.
        TypeError: A row has no prompt.
        ValueError: A message has content other than text.
    """
    taskset = load_taskset_environment(name, args).taskset
    if count < 0 and not taskset.bounded:
        raise ConfigError(
            f"The taskset {name!r} of verifiers has no end.",
            where="data.options.count",
            why="without this option, all of its rows would be read",
            fix="set data.options.count to a number of rows",
        )
    for row in taskset if count < 0 else taskset.take(count):
        data = row.data
        asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
        if not asked:
            raise TypeError(
                f"row {data.idx} of {name} has no prompt: tasks in which a simulated user writes first are unsupported"
            )
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages = [*system, *map(plain, asked)]
        yield Prompt(f"{name}-{data.idx}", messages=messages, data=data.model_dump(mode="json"))


def load_taskset_environment(name: str, args: Mapping[str, Any], max_turns: int | None = None) -> Any:
    """Load the environment that runs a taskset.

    Args:
        name: Name of the taskset.
        args: Configuration of the environment.
        max_turns: Largest number of turns of each of its agents; None = as the configuration says.

    Raises:
        ConfigError: No supported verifiers is installed, or the environment cannot be loaded.
    """
    return _loaded(name, json.dumps(args, sort_keys=True), max_turns)


@cache
def _loaded(name: str, args: str, max_turns: int | None) -> Any:
    require(EPISODES)
    import verifiers.v1 as vf

    given = json.loads(args)
    try:
        config = vf.resolve_env_config({**given, "taskset": {**given.get("taskset", {}), "id": name}})
        if max_turns is not None:
            agents = {role: agent for role, agent in config if isinstance(agent, vf.AgentConfig)}
            limits = {role: min(agent.max_turns or max_turns, max_turns) for role, agent in agents.items()}
            limited = {role: agents[role].model_copy(update={"max_turns": limit}) for role, limit in limits.items()}
            config = config.model_copy(update=limited)
        return vf.load_environment(config)
    except Exception as error:  # the taskset's package is imported and called
        raise ConfigError(
            f"The taskset {name!r} of verifiers cannot be loaded.",
            where="name and args in data.options or environment.options",
            why=f"{type(error).__name__}: {error}",
            fix="install the taskset's package, and check args against the configuration of its environment",
        ) from error
