"""An agent of smolagents with a tool: ``ToolCallingAgent``, and ``OpenAIModel`` with one change.

Between two steps smolagents rewrites what the model said as a text, in which tool calls look different. A session
refuses such a history, because it is not what the model has sampled. So this model sends the answers back unchanged.

The data of a prompt have the right ``answer``. The reward is 1 if the agent's final answer contains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from anytron.tasks import AgentResult

if TYPE_CHECKING:
    from anytron.tasks import AgentTask


class Unchanged(OpenAIModel):
    """A model that is sent its own answers as it gave them."""

    said = ()

    def generate(self, *arguments, **named):
        """Ask the model for its next answer, and keep the answer."""
        answer = super().generate(*arguments, **named)
        self.said = (*self.said, answer.raw.choices[0].message)
        return answer

    def _prepare_completion_kwargs(self, *arguments, **named):
        body, said = super()._prepare_completion_kwargs(*arguments, **named), iter(self.said)
        body["messages"] = [next(said) if one["role"] == "assistant" else one for one in body["messages"]]
        return body


@tool
def price(item: str) -> float:
    """Return the price of an item of the shop.

    Args:
        item: The item.
    """
    return {"tea": 3.5, "bread": 2.25}[item]


def solve(task: AgentTask) -> AgentResult:
    """Let the agent call tools until it calls ``final_answer``; the server refuses turns beyond the limit."""
    # tool_choice: the server cannot force a call. max_steps: at this number smolagents would ask with another prompt.
    model = Unchanged(task.model, task.base_url, task.api_key, tool_choice="auto")
    agent = ToolCallingAgent([price], model, max_steps=task.max_turns + 1, verbosity_level=LogLevel.OFF)
    answer = agent.run(task.prompt_text)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    calls = sum(call.name == "price" for step in steps for call in step.tool_calls)
    return AgentResult(float(task.data["answer"] in str(answer)), {"tool_calls": calls})
