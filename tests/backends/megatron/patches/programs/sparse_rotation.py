"""The rotation of an indexer's queries, without the patch and with it. Prints JSON."""

import json

import torch

from anytron.device.patches import Phase
from anytron.device.stack import open_device_stack

torch.set_num_threads(1)
KINDS = (torch.float32, torch.bfloat16)


def rotate(dtype):
    """What becomes of the vectors 1, 2, .. 16 and 16, .. 1: a list, or the error."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    up = torch.arange(1.0, 17.0).to(dtype)
    try:
        return dsa.rotate_activation(torch.stack((up, up.flip(0)))).float().tolist()
    except AssertionError as error:
        return str(error)


with open_device_stack("cpu") as layer:
    layer.apply_phase(Phase.BEFORE_PARALLEL_INIT)
    facts = {"unpatched": [rotate(dtype) for dtype in KINDS]}
    layer.apply_phase(Phase.BEFORE_BUILD)
    facts["patched"] = [rotate(dtype) for dtype in KINDS]
    (facts["record"],) = [row for row in layer.ledger.report() if row["id"] == "megatron.sparse-attention-rotation"]
print(json.dumps(facts))
