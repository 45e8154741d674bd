"""What the recorded responses must score, from transformers, and what must be replaced in verl."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM

from plugins.verl.tests.programs.recorded import LENGTHS, PROMPT, recorded_batch

TEMPERATURE = 0.8
REPLACED = {
    "verl.preprocess-thd-engine",
    "verl.postprocess-thd-engine",
    "verl.preprocess-bshd-engine",
    "verl.postprocess-bshd-engine",
}
"""The functions of verl with a branch on NPUs, as the ledger calls their patches."""


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


def ledgers_in(directory):
    """What was applied in each process that wrote a report (``ANYTRON_VERL_REPORT``)."""
    reports = [json.loads(path.read_text()) for path in directory.glob("patches-*.json")]
    return [[row for row in report if row["outcome"] == "applied"] for report in reports]


def replaced_in(directory):
    """The functions of verl that each process had replaced."""
    return [{row["id"] for row in ledger if row["owner"] == "verl"} for ledger in ledgers_in(directory)]


def owners_in(directory):
    """Whose patches each process had."""
    return [{row["owner"] for row in ledger} for ledger in ledgers_in(directory)]
