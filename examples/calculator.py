"""A toy task for a tool: two numbers are to be multiplied, and there is a calculator.

``37*48>`` asks. What the model writes up to ``=`` is typed into the calculator, which shows ``1776;``, or ``!`` if that
was no product; whatever else the model writes is its answer::

    37*48>37*48=1776;1776
          ------     ----   written by the model, and trained

Nobody tells the model that there is a calculator, or how to use it. The vocabulary is made on the spot: ten digits,
five signs, and special tokens, eighteen in all.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from anytron.data import Prompt
from anytron.environments import Observation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.environments import Task, Turn

SIGNS = "0123456789*>=;!"
SPECIAL = ("<eos>", "<pad>", "<unk>")


def tokenizer():
    """Make a tokenizer of one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SIGNS, *SPECIAL])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def prompts(count: int = 4096, seed: int = 0) -> Iterator[Prompt]:
    """Draw ``count`` products of two numbers of two digits."""
    generator = random.Random(seed)
    for index in range(count):
        first, second = generator.randint(10, 99), generator.randint(10, 99)
        yield Prompt(id=f"product-{index}", text=f"{first}*{second}>", data={"answer": str(first * second)})


class Calculator:
    """The calculator, and the judge.

    The right answer is worth 1. Nobody finds a question of six characters by chance, so there is something for being
    on the way: for a first turn half of the fraction of the question's characters that are right, and for a second one
    the fraction of the answer's.
    """

    def reset(self, task: Task) -> None:
        """Note the question and the right answer."""
        self.question = task.prompt_text.replace(">", "=")
        self.answer = task.data["answer"]
        self.turns = 0

    def step(self, turn: Turn) -> Observation:
        """Calculate if the turn ends with ``=``; otherwise it is the answer."""
        self.turns += 1
        reward = alike(turn.text, self.question) / 2 if self.turns == 1 else alike(turn.text, self.answer)
        if not turn.text.endswith("="):
            right = float(turn.text == self.answer)
            return Observation(done=True, reward=max(right, reward), metrics={"right": right})
        product = re.fullmatch(r"(\d+)\*(\d+)=", turn.text)
        shown = f"{int(product[1]) * int(product[2])};" if product else "!"
        return Observation(text=shown, reward=reward, metrics={"tool_calls": 1})


def alike(given: str, wanted: str) -> float:
    """Give the fraction of positions at which two texts are the same."""
    return sum(one == other for one, other in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
