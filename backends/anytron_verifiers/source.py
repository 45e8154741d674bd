"""Prompts from the dataset of an environment of verifiers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.task.data import Prompt
from anytron_verifiers.loading import load
from anytron_verifiers.messages import plain, tools_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def prompts(name: str, args: Mapping[str, Any] | None = None, count: int = -1) -> Iterator[Prompt]:
    """Give the rows of an environment's training dataset, with the tools that the model may call.

    Args:
        name: As for ``verifiers.load_environment``.
        args: Keyword arguments of the environment's ``load_environment``.
        count: How many rows, from the first; -1 = all.

    Raises:
        ConfigError: The environment cannot be loaded.
        TypeError: A row's prompt is no list of messages.
        ValueError: A message has something else than text.
    """
    environment = load(name, args or {})
    for row in environment.get_dataset(n=count).to_list():
        number, asked = row["example_id"], row["prompt"]
        if not isinstance(asked, list):
            found = f"the prompt of {name}, row {number}, is {type(asked).__name__}, no list of messages"
            raise TypeError(f"{found}: environments of plain completions are not supported")
        if isinstance(row.get("info"), str):
            row["info"] = json.loads(row["info"])
        messages = [plain(message) for message in asked]
        yield Prompt(f"{name}-{number}", messages=messages, tools=tools_of(environment, row), data=row)
