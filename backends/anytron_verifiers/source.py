"""Load an environment with a supported version of verifiers, and return the prompts of its dataset."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.task.data import Prompt
from anytron_verifiers.messages import plain, tools_of
from anytron_verifiers.release import EPISODES, TURNS, installed, require
from anytron_verifiers.tasksets import rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def prompts(name: str, args: Mapping[str, Any] | None = None, count: int = -1) -> Iterator[Prompt]:
    """Return the rows of an environment's training dataset, with the tools that the model may call.

    From verifiers 0.4 on, return the rows of a taskset; its tools are known only to the programs that run it.

    Args:
        name: Name of the environment, as for ``verifiers.load_environment``; from 0.4 on, of the taskset.
        args: Keyword arguments of the environment's ``load_environment``; from 0.4 on, its configuration.
        count: Number of rows, from the first; -1 = all.

    Raises:
        ConfigError: The environment cannot be loaded.
        TypeError: A row's prompt is not a list of messages; from 0.4 on, a row has no prompt.
        ValueError: A message has content other than text.
    """
    if installed(EPISODES):
        yield from rows(name, args or {}, count)
        return
    environment = load(name, args or {})
    for row in environment.get_dataset(n=count).to_list():
        number, asked = row["example_id"], row["prompt"]
        if not isinstance(asked, list):
            found = f"the prompt of {name}, row {number}, is of type {type(asked).__name__}, not a list of messages"
            raise TypeError(f"{found}: environments whose prompts are plain texts are not supported")
        if isinstance(row.get("info"), str):
            row["info"] = json.loads(row["info"])
        messages = [plain(message) for message in asked]
        yield Prompt(f"{name}-{number}", messages=messages, tools=tools_of(environment, row), data=row)


def load(name: str, args: Mapping[str, Any]) -> Any:
    """Load an environment with ``verifiers.load_environment``, and restore the two signal handlers that it replaces.

    Raises:
        ConfigError: No supported verifiers is installed, the environment does not exist or refuses its arguments, or
            it scores the responses to a prompt together.
    """
    require(TURNS)
    import verifiers

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        environment = verifiers.load_environment(name, **args)
    except Exception as error:  # the environment's package is imported and called
        raise ConfigError(
            f"The environment {name!r} of verifiers cannot be loaded.",
            where="name and args in data.options or environment.options",
            why=f"{type(error).__name__}: {error}",
            fix="install the environment's package, and check args against the parameters of its load_environment()",
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"The environment {name!r} of verifiers scores the responses to a prompt together.",
            where="name in data.options or environment.options",
            why=("its rubric has reward functions that score a whole group, but Anytron scores each response alone"),
            fix="remove these functions from the rubric, or choose another environment",
        )
    return environment
