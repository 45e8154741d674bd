"""A toy task for a tool: two numbers of two digits are to be multiplied, and there is a calculator.

``3748>`` asks for 37 times 48. What the model writes up to ``*`` is typed into the calculator, which shows ``1776;``,
or ``!;`` if that was not two numbers of two digits; whatever else the model writes is its answer::

    3748>3748*1776;1776
         -----     ----   written by the model, and trained

Nobody tells the model that there is a calculator, or how to use it. The vocabulary is made on the spot: ten digits,
four signs, and special tokens, seventeen in all.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from anytron.tasks import Observation, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.tasks import Task, Turn

SIGNS = "0123456789*>;!"
SPECIAL = ("<eos>", "<pad>", "<unk>")


def tokenizer():
    """Make a tokenizer of one token per character, whose chat template writes contents of messages and nothing else."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SIGNS, *SPECIAL])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )


def prompts(count: int = 4096, seed: int = 0) -> Iterator[Prompt]:
    """Draw ``count`` products of four digits.

    No number has the digit 0. It would be the rarest digit, and a model that stops exploring before it has written a 0
    in the right place never learns to write it.
    """
    generator, numbers = random.Random(seed), range(32, 100)
    pairs = [(a, b) for a in numbers for b in numbers if "0" not in f"{a}{b}{a * b}"]
    for index, (first, second) in enumerate(generator.choices(pairs, k=count)):
        yield Prompt(id=f"product-{index}", text=f"{first}{second}>", data={"answer": str(first * second)})


class Calculator:
    """The calculator, and the judge.

    The reward of the right answer, found with the calculator, is 1. A model that guesses never finds it, so parts are
    rewarded as well: half of the fraction of the question's characters that the model types, plus half of the fraction
    of the display's characters that it repeats as its answer, whatever it has typed.
    """

    def reset(self, task: Task) -> None:
        """Note the question and the right answer."""
        self.question = task.prompt_text.replace(">", "*")
        self.answer = task.data["answer"]
        self.display = ""

    def step(self, turn: Turn) -> Observation:
        """Calculate in the first turn if it ends with ``*``; anything else is the answer."""
        if self.display or not turn.text.endswith("*"):
            repeated = alike(turn.text, self.display) if self.display.isdigit() else 0.0
            return Observation(done=True, reward=repeated / 2, metrics={"right": float(turn.text == self.answer)})
        numbers = re.fullmatch(r"(\d\d)(\d\d)\*", turn.text)
        self.display = str(int(numbers[1]) * int(numbers[2])) if numbers else "!"
        typed = alike(turn.text, self.question)
        return Observation(text=f"{self.display};", reward=typed / 2, metrics={"tool_calls": 1})


def alike(given: str, wanted: str) -> float:
    """Return the fraction of positions at which two texts are the same."""
    return sum(one == other for one, other in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
