"""An agent with the tools of an MCP server, which runs beside it: the client of ``mcp``, and OpenAI's client.

The data of a prompt have the right ``answer``. The reward is 1 if the model's last message contains it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from openai import AsyncOpenAI

from anytron.tasks import AgentResult

if TYPE_CHECKING:
    from anytron.tasks import AgentTask

SERVER = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("mcp_server.py"))])


async def solve(task: AgentTask) -> AgentResult:
    """Let the model call tools until it answers without one, or has no turn left."""
    messages = [{"role": "user", "content": task.prompt_text}]
    async with (
        Client(stdio_client(SERVER)) as server,
        AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client,
    ):
        tools = [as_function(tool) for tool in (await server.list_tools()).tools]
        for _ in range(task.max_turns):
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=tools)
            said = answer.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                found = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                text = "".join(part.text for part in found.content)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    results = sum(isinstance(message, dict) for message in messages) - 1
    return AgentResult(float(task.data["answer"] in (said.content or "")), {"tool_calls": results})


def as_function(tool) -> dict:
    """Describe a tool of the server in the form of OpenAI's API."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
    }
