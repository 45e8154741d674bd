"""A Mamba layer on one rank against Hugging Face's layer; print the differences.

Run as: python mamba.py DIRECTORY, the directory holding a tiny Nemotron-3. Compared are, forward and backward, rows
with padding on the right and on the left, holding zeros, anything or NaN, and packed sequences. Hugging Face computes
each sequence alone. Prints JSON: for each case the largest difference of the output and of two gradients (input,
convolution), and what padding's gradient holds.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from anytron.base.errors import EngineError
from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron.sequences.masks import AttnMask, MaskKind
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

torch.set_num_threads(1)
directory = Path(sys.argv[1])
platform = CpuPlatform()
context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
ledger = Ledger(context=context)
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, trainer_patches(phase, context))

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from anytron.sequences.masks import scope_of  # noqa: E402
from anytron_megatron.models.bridge import BridgeSource  # noqa: E402
from anytron_megatron.training.parallel import initialize  # noqa: E402

initialize(platform.runtime(), ParallelSizes(), seed=1, timeout_s=60)
theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model.layers[0].mixer
LENGTHS, WIDTH, HIDDEN = (5, 8, 1), 8, 64
generator = torch.Generator().manual_seed(3)
hidden, cotangent = (torch.randn(len(LENGTHS), WIDTH, HIDDEN, generator=generator) for _ in range(2))
position, lengths = torch.arange(WIDTH), torch.tensor(LENGTHS)[:, None]
RIGHT, LEFT = position < lengths, position >= WIDTH - lengths


def build():
    source = BridgeSource(
        directory,
        dtype=torch.float32,
        sizes=ParallelSizes(),
        recompute="none",
        deterministic=False,
        portable=True,
        transformer={},
    )
    (model,) = source.build(torch.device("cpu"))
    return model.decoder.layers[0].mixer


def wanted(real):
    """Hugging Face's layer on each sequence alone: output and the two gradients."""
    theirs.zero_grad()
    given = hidden.clone().requires_grad_()
    output = torch.zeros_like(hidden)
    for row, keep in enumerate(real):
        output[row, keep] = theirs(given[row, keep][None])[0]
    output.backward(cotangent.masked_fill(~real[..., None], 0))
    return output.detach(), given.grad, theirs.conv1d.weight.grad.clone()


def computed(real, fill, known, packed=None):
    """Megatron's layer on all rows together, padding and its gradient holding ``fill``."""
    layer.zero_grad()
    pads = ~real[..., None]
    shape = (1, -1, HIDDEN) if packed else hidden.shape
    rows, back = (part.masked_fill(pads, fill).reshape(shape).transpose(0, 1) for part in (hidden, cotangent))
    given = rows.clone().requires_grad_()
    with scope_of(AttnMask(MaskKind.NONE, "causal", linear_attn_mask=known))():
        output, _ = layer(given, packed_seq_params=packed)
    output.backward(back)
    parts = (part.detach().transpose(0, 1).reshape(hidden.shape) for part in (output, given.grad))
    return *parts, layer.conv1d_weight.grad.clone()


def differences(real, fill, known=None, packed=None):
    got, expected = computed(real, fill, real if known is None else known, packed), wanted(real)
    apart = {
        name: float((one - other)[real].abs().max())
        for name, one, other in zip(("output", "input"), got, expected, strict=False)
    }
    apart["convolution"] = float((got[2] - expected[2]).abs().max())
    return {**apart, "padding's gradient": float(got[1][~real].abs().max())}


def message(function, *expected):
    try:
        function()
    except expected as error:
        return str(error)
    return None


facts = {"unpatched": message(build, ImportError)}
ledger.apply(Phase.BEFORE_BUILD, trainer_patches(Phase.BEFORE_BUILD, context))
layer = build()
for name, fill in {"zeros": 0.0, "anything": 7.0, "nan": torch.nan}.items():
    facts[f"right, {name}"] = differences(RIGHT, fill)
    facts[f"left, {name}"] = differences(LEFT, fill)
facts["left, all tokens"] = differences(LEFT, 7.0, torch.ones_like(LEFT))
starts = torch.arange(0, 3 * WIDTH + 1, WIDTH, dtype=torch.int32)
ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
facts["packed"] = differences(RIGHT, 0.0, packed=PackedSeqParams("thd", ends, ends, starts, starts))

rows = hidden.transpose(0, 1)
facts["no scope"] = message(lambda: layer(rows), EngineError)
for name, mask in {
    "no map": AttnMask(MaskKind.NONE, "causal"),
    "another shape": AttnMask(MaskKind.NONE, "causal", linear_attn_mask=RIGHT[:, :-1]),
}.items():
    with scope_of(mask)():
        facts[name] = message(lambda: layer(rows), EngineError)
facts["applied"] = {row["id"]: row["outcome"] for row in ledger.report() if "mamba" in row["id"]}
print(json.dumps(facts))
dist.destroy_process_group()
