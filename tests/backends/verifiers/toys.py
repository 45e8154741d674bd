"""Small environments of verifiers, of each kind; ``load_environment(kind)`` makes one."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

CLEANED = []
"""The numbers of the rows whose rollouts have been cleaned up, in this process."""


def load_environment(kind, **options):
    return globals()[kind](**options)


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


def single():
    """Sums."""
    data = [{"question": f"{row}+{row}", "answer": str(2 * row)} for row in range(4)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(data), system_prompt="add", rubric=vf.Rubric(funcs=[right]))


class Guess(vf.MultiTurnEnv):
    """A digit is to be guessed; the fewer turns, the better."""

    async def setup_state(self, state):
        state["digit"] = state["info"]["digit"]

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == "crash":
            raise vf.ToolError("the table fell over")
        if said == "rewrite":
            messages[0].content = "what was asked is another thing now"
        if said == "paint":
            return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        hint = "up" if said < str(state["digit"]) else "down"
        return [{"role": "user", "content": hint}]

    @vf.stop
    async def found(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1]["content"] == str(state["digit"])

    @vf.cleanup
    async def note(self, state):
        CLEANED.append(state["example_id"])


async def sooner(state):
    return 1.0 / len(state["trajectory"]) if state["stop_condition"] == "found" else 0.0


def digits(completion):
    """The fraction of characters that are digits, in all that the model said."""
    said = "".join(message["content"] for message in completion if message["role"] == "assistant")
    return sum(character.isdigit() for character in said) / max(len(said), 1)


def guess(max_turns=5):
    data = [{"question": f"digit {row}?", "info": {"digit": row}} for row in range(8)]
    rubric = vf.Rubric(funcs=[sooner, digits], weights=[1.0, 0.5])
    return Guess(max_turns=max_turns, dataset=Dataset.from_list(data), rubric=rubric)


def moves_the_prompt():
    """Begin with something else than the row's prompt."""

    class Mover(Guess):
        async def setup_state(self, state):
            state["prompt"] = [vf.UserMessage(content="elsewhere")]

    return Mover(dataset=Dataset.from_list([{"question": "here", "info": {"digit": 1}}]), rubric=vf.Rubric([sooner]))


def multiply(first: int, second: int) -> int:
    """Multiply two numbers.

    Args:
        first: One.
        second: The other.
    """
    return first * second


def tool():
    """Products, with a calculator."""
    data = [{"question": f"{row}*12", "answer": str(12 * row)} for row in range(4)]
    return vf.ToolEnv(
        tools=[multiply], max_turns=3, dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[right], weights=[2.0])
    )


def mixed():
    """A group of environments."""
    return vf.EnvGroup([single(), guess()], env_names=["single", "guess"])


def group():
    """Scores all responses to a prompt together."""

    def shortest(completions) -> list[float]:
        return [0.0] * len(completions)

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "q", "answer": "a"}]), rubric=vf.Rubric(funcs=[shortest])
    )
