"""The user's script in a process that is also looked into: our layouts against verl's own functions, and what remains.

Run as: compared.py MODEL, as one rank of TENSOR * CONTEXT many. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys

import torch

OWN = (torch.cuda.current_device, torch.cuda.Stream, torch.compile, torch.zeros, torch.Tensor.to)

import user  # noqa: E402
from verl.models.mcore import model_forward, util  # noqa: E402
from verl.utils import device  # noqa: E402

from anytron_verl import layouts, process  # noqa: E402


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def flat(found):
    return found.values()


def differing(engine, sequence_format, seed):
    """Count slots in which ours and verl's disagree, of real tokens; the labels that verl rolls are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (6,), generator=generator).tolist()
    ids = jagged([torch.randint(1, 200, (length,), generator=generator) for length in lengths])
    micro_batch = engine._layouts.prepare(ids)
    valid = micro_batch.prepared.inputs.layout.valid
    ours, theirs, back = (
        getattr(util, f"{what}_{sequence_format}_engine") for what in ("preprocess", "preprocess", "postprocess")
    )
    theirs = theirs.__wrapped__
    with layouts.current_micro_batch(micro_batch):
        our_ids, our_params, our_positions = ours(ids)
        our_labels = ours(ids, need_roll=True)[0]
        their_ids, their_params, their_positions = theirs(ids)
        their_labels = theirs(ids, need_roll=True)[0]
        has_next = our_labels > 0
        found = {
            "ids": int((our_ids != their_ids).sum()),
            "positions": int((our_positions != their_positions)[valid].sum()),
            "labels": int((our_labels != their_labels)[has_next & valid].sum()),
            "without a label": int((~has_next & valid).sum()),
        }
        # The way back: what a model gives at each slot returns to its token.
        output = our_ids.to(torch.float32) / 7
        if sequence_format == "thd":
            for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv"):
                mine, other = getattr(our_params, name), getattr(their_params, name)
                found[name] = int((torch.as_tensor(mine) != torch.as_tensor(other)).sum())
            ours_back = back(output, our_params, ids, len(lengths))
            theirs_back = back.__wrapped__(output, their_params, ids, len(lengths))
        else:
            ours_back = back(output, our_params)
            theirs_back = back.__wrapped__(output, their_params)
        found["way back"] = int((flat(ours_back) != flat(theirs_back)).sum())
        found["way back of ids"] = int((flat(ours_back) != ids.values().float() / 7).sum())
    found["slots"] = int(valid.sum())
    return found


class Asked:
    """Stands for ``is_npu_available`` in verl's functions, and counts who asks."""

    count = 0

    def __bool__(self):
        Asked.count += 1
        return False


def main(model):
    stack = process.stack()
    util.is_npu_available = Asked()
    facts = {"platform": type(device.get_platform()).__name__, "stack": stack.platform.name}
    for sequence_format in ("thd", "bshd"):
        Asked.count = 0
        of_format, worker = user.main(model, sequence_format, "float32")
        of_format["asked for an NPU"] = Asked.count
        of_format["differing"] = [differing(worker.engine, sequence_format, seed) for seed in range(4)]
        of_format["asked by verl's own"] = Asked.count
        facts[sequence_format] = of_format
    facts["patches"] = {row["id"]: [row["outcome"], row["detail"]] for row in stack.ledger.report()}
    facts["replaced"] = hasattr(model_forward.preprocess_thd_engine, "__wrapped__")
    process.stop()
    facts["torch"] = (torch.cuda.current_device, torch.cuda.Stream, torch.compile, torch.zeros, torch.Tensor.to) == OWN
    facts["transformer_engine"] = [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
    facts["still replaced"] = [
        name
        for module in (util, model_forward)
        for name in (
            "preprocess_thd_engine",
            "postprocess_thd_engine",
            "preprocess_bshd_engine",
            "postprocess_bshd_engine",
        )
        if hasattr(getattr(module, name), "__wrapped__")
    ]
    return facts


if __name__ == "__main__":
    found = main(*sys.argv[1:])
    print(json.dumps(found), flush=True)
    os._exit(0)
