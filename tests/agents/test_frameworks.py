"""Agents of published frameworks, unmodified: their own tool loops, over HTTP, with a model that follows a script."""

from __future__ import annotations

import pytest

from tests.agents.driving import agent, check_one_conversation, playing, solved
from tests.needs_agents import NEEDS_AGENTS

pytestmark = NEEDS_AGENTS
ASKED = "What do a tea and a bread cost?"
DATA = {"answer": "5.75"}


def call(item):
    return f'<tool_call>\n{{"name": "price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


SCRIPTS = {
    "one call after another": ([f"First the tea.\n{call('tea')}", call("bread"), "Together 5.75."], 1.0, 2),
    "two calls at once": ([f"{call('tea')}\n{call('bread')}", "Together 5.75."], 1.0, 2),
    "with thoughts": ([f"<think>\nhm\n</think>\n\n{call('tea')}", "<think>\nso\n</think>\n\nIt costs 3.5."], 0.0, 1),
    "without a call": (["Nothing."], 0.0, 0),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("file", ["mcp_agent.py", "langgraph_agent.py"])
def test_the_conversation_of_a_framework_is_recorded_as_it_was_sampled(file, script):
    texts, reward, calls = SCRIPTS[script]
    with playing(texts) as server:
        result, session = solved(server, agent(file), ASKED, DATA)
        check_one_conversation(server, session, len(texts))
    assert (result.reward, result.metrics) == (reward, {"tool_calls": calls})


def test_a_stream_of_langgraph_is_recorded_as_it_was_sampled():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def solve(task):
        model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key, streaming=True)
        graph = create_agent(model, [agent("langgraph_agent.py", "price")])
        return graph.invoke({"messages": [("user", task.prompt_text)]})["messages"][-1].content

    texts = SCRIPTS["one call after another"][0]
    with playing(texts) as server:
        answer, session = solved(server, solve, ASKED)
        check_one_conversation(server, session, len(texts))
    assert answer == texts[-1]


def final(answer):
    return f'<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "{answer}"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("texts", "reward", "calls"),
    [
        ([f"First the tea.\n{call('tea')}", call("bread"), final("5.75")], 1.0, 2),
        ([f"{call('tea')}\n{call('bread')}", final("5.75")], 1.0, 2),
        (["What shop?", call("tea"), final("3.5")], 0.0, 1),  # smolagents asks again for a call
    ],
)
def test_smolagents_is_recorded_as_it_was_sampled(texts, reward, calls):
    with playing(texts) as server:
        result, session = solved(server, agent("smolagents_agent.py"), ASKED, DATA)
        check_one_conversation(server, session, len(texts))
    assert (result.reward, result.metrics) == (reward, {"tool_calls": calls})


def test_smolagents_as_it_is_changes_its_history():
    import smolagents

    tools = [agent("smolagents_agent.py", "price")]

    def solve(task):
        model = smolagents.OpenAIModel(task.model, task.base_url, task.api_key, tool_choice="auto")
        smolagents.ToolCallingAgent(tools, model, verbosity_level=smolagents.LogLevel.OFF).run(task.prompt_text)

    with playing([call("tea")]) as server, pytest.raises(smolagents.AgentError, match="history_not_recorded"):
        solved(server, solve, ASKED)
