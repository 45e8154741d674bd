"""A task with a tool that returns two results at once, and a chat template that puts both into one turn."""

from __future__ import annotations

import random

from anytron.tasks import Observation, Prompt
from examples.calculator import tokenizer as of_characters

TEMPLATE = """{%- for message in messages -%}
{%- set tool = message.role == "tool" -%}
{%- if not tool or loop.first or messages[loop.index0 - 1].role != "tool" -%}>{%- endif -%}
{{ message.content }}
{%- if tool and not loop.last and messages[loop.index0 + 1].role == "tool" -%};{%- else -%}!{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}>{%- endif -%}"""
"""``>`` begins a turn and ``!`` ends it; ``;`` is between the results of tools."""


def tokenizer():
    """Make a tokenizer of one token per character."""
    made = of_characters()
    made.chat_template = TEMPLATE
    return made


def prompts(count=64):
    """Draw questions of two digits."""
    draw = random.Random(0)
    for index in range(count):
        question = str(draw.randrange(10, 100))
        yield Prompt(f"two-{index}", messages=[{"role": "user", "content": question}], data={"question": question})


class TwoTools:
    """Answers each turn but the second with two results; the reward is the part of the answer that is digits."""

    def reset(self, task):
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        if self.turns == 2:
            return Observation(done=True, reward=sum(map(str.isdigit, turn.text)) / 5)
        return Observation(messages=[{"role": "tool", "content": one} for one in ("4", "56")])
