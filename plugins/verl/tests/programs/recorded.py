"""The sequences that every rank and every format is given."""

import torch

PROMPT, RESPONSE = 8, 12
LENGTHS = [(3, 12), (8, 5), (1, 1), (6, 9), (8, 12), (2, 7), (5, 3), (4, 11)]  # (prompt, response), recorded


def recorded_batch():
    """Give verl's columns of a rollout: prompts padded on the left, responses on the right."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 250, (len(LENGTHS), PROMPT + RESPONSE), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(LENGTHS):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {
        "input_ids": ids * mask, "prompts": (ids * mask)[:, :PROMPT], "responses": (ids * mask)[:, PROMPT:],
        "attention_mask": mask, "position_ids": positions, "response_mask": mask[:, PROMPT:],
    }  # fmt: skip
