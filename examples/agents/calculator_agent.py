"""The task of examples/calculator.py as a program that talks to the model with OpenAI's client.

The model reads ``3748>`` and writes ``3748*``, the program answers ``1776;``, and the model writes ``1776``. Rewards
and metrics are the same as in the class ``Calculator``. The answer's text ends before the stop string ``*``, which the
server reports as ``stop_reason``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from openai import OpenAI

from anytron.tasks import AgentResult

if TYPE_CHECKING:
    from anytron.tasks import AgentTask


def solve(task: AgentTask) -> AgentResult:
    """Let the model type a question into the calculator, show it the display, and judge its answer."""
    messages = [{"role": "user", "content": task.prompt_text}]
    client = connected(task.base_url).with_options(api_key=task.api_key)
    typed = turn(client, task.model, messages)
    if not typed.endswith("*"):
        return AgentResult(0.0, {"right": float(typed == task.data["answer"])})
    numbers = re.fullmatch(r"(\d\d)(\d\d)\*", typed)
    display = str(int(numbers[1]) * int(numbers[2])) if numbers else "!"
    messages.append({"role": "user", "content": f"{display};"})
    answer = turn(client, task.model, messages)
    repeated = alike(answer, display) if numbers else 0.0
    reward = alike(typed, task.prompt_text.replace(">", "*")) / 2 + repeated / 2
    return AgentResult(reward, {"tool_calls": 1, "right": float(answer == task.data["answer"])})


@cache
def connected(base_url: str) -> OpenAI:
    """Make one client for all agents of a process: making it takes longer than an answer of a small model."""
    return OpenAI(base_url=base_url, api_key="each session has its own")


def turn(client: OpenAI, model: str, messages: list) -> str:
    """Ask the model to continue the conversation, and append its message; return its text with the stop string."""
    choice = client.chat.completions.create(model=model, messages=messages).choices[0]
    messages.append(choice.message)
    return choice.message.content + (choice.stop_reason or "")


def alike(given: str, wanted: str) -> float:
    """Return the fraction of positions at which two texts are the same."""
    return sum(one == other for one, other in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
