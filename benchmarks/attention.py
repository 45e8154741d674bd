"""Packed attention, forward and backward: ours against one call per sequence.

The loop is what a packed batch costs without a variable-length kernel (the portable Transformer Engine's
first sketch did it): slice each sequence out, ``scaled_dot_product_attention``, concatenate. Both run in one
process, in turn; ratios are those of the medians. ``first_ms`` is a micro-batch's first layer, which plans the
groups; ``ours_ms`` a later one.

    python benchmarks/attention.py [--json] [--repeats 10] [--threads 1]
"""

import statistics
from itertools import accumulate

import torch

from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.plugins import open_session
from anytron.traits import ModelTraits
from harness import argument_parser, in_turn, progress, report, timed

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


def measure(lengths, repeats, runtime):
    total, device = sum(lengths), runtime.current_device()
    operands = [
        torch.randn(total, heads, DIM, device=device, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cotangent = torch.randn(total, HEADS, DIM, device=device)
    attend = make_attention(AttentionSpec(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, ModelTraits()))
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def ours(cu_seqlens):
        call = AttentionCall("thd", "padding_causal", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        return lambda *inputs: attend(*inputs, call)

    def per_sequence(*inputs):
        return loop(*inputs, lengths)

    torch.testing.assert_close(ours(cumulative)(*operands), per_sequence(*operands), rtol=1e-4, atol=1e-5)

    def seconds(forward):
        return timed(lambda: torch.autograd.grad(forward(*operands), operands, cotangent), runtime)[0]

    ways = {
        "first_ms": lambda: seconds(ours(cumulative.clone())),
        "ours_ms": lambda: seconds(ours(cumulative)),
        "loop_ms": lambda: seconds(per_sequence),
    }
    medians = {name: statistics.median(times) * 1e3 for name, times in in_turn(ways, repeats).items()}
    return {**medians, "loop_by_ours": medians["loop_ms"] / medians["ours_ms"]}


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runtime = open_session().platform.runtime()
    rows = {}
    for name, lengths in CASES.items():
        progress(f"{name} tokens")
        rows[name] = measure(lengths, arguments.repeats, runtime)
    report({"sequences": rows}, as_json=arguments.json, runtime=runtime)


if __name__ == "__main__":
    main()
