"""Tiny models of text, conversations of one token per character, and what transformers makes of both."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytron_conformance.tiny_models import write_tiny_model

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import sort_digits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIONS = {"template": "dummy"}
"""What ms-swift is told for these models."""


def prepare(directory: Path, family: str) -> Path:
    """Write a tiny model, a tokenizer, and six conversations of different lengths."""
    model = directory / "model"
    write_tiny_model(family, model)
    sort_digits.tokenizer().save_pretrained(model)
    drawn = random.Random(0)
    with (directory / "train.jsonl").open("w", encoding="utf-8") as file:
        for digits in (2, 7, 4, 11, 3, 5):
            text = "".join(drawn.choices(sort_digits.DIGITS, k=digits))
            messages = [("user", text + sort_digits.SEPARATOR), ("assistant", "".join(sorted(text)))]
            file.write(
                json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}) + "\n"
            )
    return directory


def conversations(directory: Path) -> list[dict[str, Any]]:
    """Read what :func:`prepare` has written."""
    return [json.loads(line) for line in (directory / "train.jsonl").read_text(encoding="utf-8").splitlines()]


def answer_losses(directory: Path, model: PreTrainedModel) -> list[torch.Tensor]:
    """Compute transformers' loss of each token of each answer, its end included, each conversation by itself."""
    tokenizer = sort_digits.tokenizer()
    losses = []
    for conversation in conversations(directory):
        prompt, answer = (tokenizer(message["content"])["input_ids"] for message in conversation["messages"])
        tokens = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :], reduction="none"))
    return losses
