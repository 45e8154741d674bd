"""A model that knows how to use the calculator of examples/."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from anytron.task.data.prompts import TokenizedPrompt
from anytron.workers.engines.rollout_engine import Response
from tests.core.run.rollout.replicas import Engine

EXAMPLE = Path(__file__).parents[4] / "examples" / "calculator.py"
QUESTIONS = ["1234", "5678", "9012", "1010", "9999"]
END = 14


class Pupil(Engine):
    """Asks the calculator for the product in the prompt, and repeats what it shows."""

    def poll(self, seconds):
        self.order.shuffle(self.held)
        done, self.held = self.held[:3], self.held[3:]
        return [(request.id, self.response(request)) for request in done]

    def response(self, request):
        text = self.tokenizer.decode(request.prompt.tokens)
        if text.endswith(">"):
            tokens = self.encode(self.ask(text[:-1]))
        else:
            tokens = [*self.encode(text.split("*")[-1].strip(";!")), END]
        longest = request.sampling.max_new_tokens
        reason = "stop" if len(tokens) <= longest else "length"
        tokens = tuple(tokens[:longest])
        log_probs = tuple(-random.Random(request.seed + place).random() for place in range(len(tokens)))
        return Response(tokens, log_probs, reason, (self.version,) * len(tokens), self.routing(request, tokens))

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @staticmethod
    def routing(request, tokens):
        """Two experts for each token that it has read: the token's number, and how much it was given to read."""
        seen = [*request.prompt.tokens, *tokens][:-1]
        return torch.tensor([[[token, len(request.prompt.tokens)]] for token in seen])

    @staticmethod
    def ask(question):
        return f"{question}*"


def prompt(tokenizer, question):
    text = f"{question}>"
    tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return TokenizedPrompt(question, text, tokens, {"answer": product(question)})


def product(question):
    return str(int(question[:2]) * int(question[2:]))


class Training:
    """A call of training ranks, which takes until something is so."""

    def __init__(self, until):
        self.until = until

    @property
    def done(self):
        return self.until()


def asked(executor):
    return sum(len(group.engine.seen) for group in executor.groups)
