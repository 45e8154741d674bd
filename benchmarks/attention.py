"""Packed attention, forward and backward: ours against one call per sequence.

The loop is what a packed batch costs without a variable-length kernel (the portable Transformer Engine's
first sketch did it): slice each sequence out, ``scaled_dot_product_attention``, concatenate. Both run in one
process, in turn; ratios are those of the medians. ``first_ms`` is a micro-batch's first layer, which plans the
groups; ``ours_ms`` a later one.

    python benchmarks/attention.py [--json] [--repeats 10] [--threads 1]
"""

import argparse
import json
import statistics
import time
from itertools import accumulate

import torch

from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.traits import ModelTraits

HEADS, KV_HEADS, DIM = 4, 2, 16


def ragged(count, low, high):
    return torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(0)).tolist()


CASES = {
    "512 of 9": [9] * 512,
    "512 of 8-16": ragged(512, 8, 16),
    "512 of 4-128": ragged(512, 4, 128),
    "512 of 16-512": ragged(512, 16, 512),
    "32 of 16-512": ragged(32, 16, 512),
}


def loop(query, key, value, lengths):
    parts = []
    for sequence in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        batched = [x.transpose(0, 1)[None] for x in sequence]
        output = torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)


def milliseconds(forward, operands, cotangent):
    began = time.perf_counter()
    torch.autograd.grad(forward(*operands), operands, cotangent)
    return (time.perf_counter() - began) * 1e3


def measure(lengths, repeats):
    total = sum(lengths)
    operands = [torch.randn(total, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    cotangent = torch.randn(total, HEADS, DIM)
    attend = make_attention(AttentionSpec(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, ModelTraits()))
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    def ours(cu_seqlens):
        call = AttentionCall("thd", "padding_causal", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        return lambda *inputs: attend(*inputs, call)

    def per_sequence(*inputs):
        return loop(*inputs, lengths)

    torch.testing.assert_close(ours(cumulative)(*operands), per_sequence(*operands), rtol=1e-4, atol=1e-5)
    times = {"first_ms": [], "ours_ms": [], "loop_ms": []}
    for _ in range(repeats):
        times["first_ms"].append(milliseconds(ours(cumulative.clone()), operands, cotangent))
        times["ours_ms"].append(milliseconds(ours(cumulative), operands, cotangent))
        times["loop_ms"].append(milliseconds(per_sequence, operands, cotangent))
    result = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {**result, "loop_over_ours": round(result["loop_ms"] / result["ours_ms"], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {name: measure(lengths, arguments.repeats) for name, lengths in CASES.items()}
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "threads": arguments.threads, "cases": results}, indent=2))
        return
    for name, result in results.items():
        print(f"{name:>14}: " + "  ".join(f"{key} {value:g}" for key, value in result.items()))


if __name__ == "__main__":
    main()
