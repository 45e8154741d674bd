"""An agent of LangGraph with a tool: ``create_agent`` of langchain, and ``ChatOpenAI`` of langchain-openai.

The data of a prompt have the right ``answer``. The reward is 1 if the model's last message contains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from anytron.tasks import AgentResult

if TYPE_CHECKING:
    from anytron.tasks import AgentTask


def price(item: str) -> float:
    """Return the price of an item of the shop."""
    return {"tea": 3.5, "bread": 2.25}[item]


def solve(task: AgentTask) -> AgentResult:
    """Let the agent call its tool until it answers without a call."""
    model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key)
    messages = create_agent(model, [price]).invoke({"messages": [("user", task.prompt_text)]})["messages"]
    calls = sum(message.type == "tool" for message in messages)
    return AgentResult(float(task.data["answer"] in messages[-1].content), {"tool_calls": calls})
