"""What the recorded responses must score, from transformers."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from plugins.verl.tests.programs.recorded import LENGTHS, PROMPT, recorded_batch

TEMPERATURE = 0.8


def responses(values):
    """The values of real response tokens, one after the other."""
    table = torch.tensor(values)
    return torch.cat([table[row, :length] for row, (_, length) in enumerate(LENGTHS)])


def of_transformers(model, **config):
    """Log-probs of the recorded responses, each sequence alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **config)
    ids, found = recorded_batch()["input_ids"], []
    with torch.no_grad():
        for row, (prompt, response) in enumerate(LENGTHS):
            tokens = ids[row, PROMPT - prompt : PROMPT + response]
            log_probs = (network(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            found.append(log_probs.gather(-1, tokens[1:, None])[prompt - 1 :, 0])
    return torch.cat(found)
