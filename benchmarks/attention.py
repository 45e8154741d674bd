"""Packed attention, forward and backward: every kernel of this device, and one call per sequence.

``kernels``: causal sequences of one length, so that torch's ``scaled_dot_product_attention`` has a form for them too:
the row ``torch, dense``. Rows that end in ``, direct`` call a library with what its adapter would have made of the
call. ``tflops`` counts 4 * length^2 / 2 * heads * head size per sequence forward and 2.5 times that backward, as
FlashAttention's own benchmark does (its benchmarks/benchmark_flash_attention.py, ``flops``); ``by_matmul`` divides it
by what a large matrix product reaches here, ``by_torch`` by the dense row, ``by_direct`` by the fastest direct one.

``sequences``: ours against a loop. The loop is what a packed batch costs without a variable-length kernel (the portable
Transformer Engine's first sketch did it): slice each sequence out, ``scaled_dot_product_attention``, concatenate.
``first_ms`` is a micro-batch's first layer, which plans the groups; ``ours_ms`` a later one.

All ways run in one process, in turn; ratios are those of the medians.

    python benchmarks/attention.py [--json] [--repeats 10] [--threads 1]
"""

import functools
import statistics
from itertools import accumulate
from typing import NamedTuple

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


class Shape(NamedTuple):
    """Attention of one layer, on a GPU a part of an 8-billion-parameter model's."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    lengths: tuple[tuple[int, int], ...]
    matmul: int


SHAPES = {
    "cpu": Shape(torch.float32, 4, 2, 64, ((4, 256),), 1024),
    "cuda": Shape(torch.bfloat16, 32, 8, 128, ((16, 1024), (4, 4096), (1, 16384)), 8192),
}
"""By type of device; others take that of ``cuda``."""


def kernels_of(spec, count, length, runtime):
    """Functions of packed operands, by name: each kernel that this device has, and the libraries below them."""
    cumulative = torch.arange(count + 1, dtype=torch.int32, device=runtime.current_device()) * length
    call = AttentionCall("thd", "padding_causal", cumulative, cumulative, None, None, length, length)
    made, direct = {"neutral": make_attention(spec)}, {}
    if runtime.device_type == "cuda":
        from anytron_cuda.attention import flash_attention_2, flash_attention_3, varlen
        from anytron_cuda.attention.choice import CANDIDATES
        from anytron_cuda.attention.packed import Sequences
        from anytron_cuda.capabilities import capabilities

        offered = capabilities()
        made = {name: one.make(spec) for name, one in CANDIDATES.items() if one.obstacle(offered, spec) is None}
        told = Sequences(cumulative, cumulative, length, length, True, (-1, 0), spec.scale)
        for library in (flash_attention_3, flash_attention_2, varlen):
            name = library.__name__.rpartition(".")[2]
            if name in made:
                direct[f"{name}, direct"] = functools.partial(library.attend, sequences=told)

    def dense(*operands):
        query, key, value = (operand.unflatten(0, (count, length)).transpose(1, 2) for operand in operands)
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)

    ours = {name: functools.partial(kernel, call=call) for name, kernel in made.items()}
    return {"torch, dense": dense, **direct, **ours}


def compare_kernels(shape, count, length, matmul_tflops, repeats, runtime):
    device, total = runtime.current_device(), count * length
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    operands = [
        torch.randn(total, number, shape.size, device=device, dtype=shape.dtype, requires_grad=True) for number in heads
    ]
    cotangent = torch.randn_like(operands[0])
    spec = AttentionSpec(
        shape.heads,
        shape.kv_heads,
        shape.size,
        shape.size,
        shape.size**-0.5,
        ModelTraits(),
        device_type=runtime.device_type,
    )
    kernels = kernels_of(spec, count, length, runtime)

    def seconds(kernel):
        forward, output = timed(lambda: kernel(*operands), runtime)
        backward, _ = timed(lambda: torch.autograd.grad(output, operands, cotangent), runtime)
        return forward, backward

    rows = {}
    for name, times in in_turn(
        {name: functools.partial(seconds, kernel) for name, kernel in kernels.items()}, repeats, warm_up=2
    ).items():
        forward, backward = (statistics.median(side) for side in zip(*times, strict=True))
        operations = 4 * length**2 / 2 * shape.heads * shape.size * count * 3.5
        tflops = operations / (forward + backward) / 1e12
        rows[name] = {"forward_ms": forward * 1e3, "backward_ms": backward * 1e3, "tflops": tflops}
    best = max((row["tflops"] for name, row in rows.items() if name.endswith("direct")), default=None)
    for row in rows.values():
        row["by_matmul"] = row["tflops"] / matmul_tflops
        row["by_torch"] = row["tflops"] / rows["torch, dense"]["tflops"]
        row["by_direct"] = None if best is None else row["tflops"] / best
    return rows


def measure_matmul(shape, repeats, runtime):
    """What a large matrix product reaches, in TFLOP/s."""
    side = shape.matmul
    one, other = (torch.randn(side, side, device=runtime.current_device(), dtype=shape.dtype) for _ in range(2))
    times = in_turn({"matmul": lambda: timed(lambda: one @ other, runtime)[0]}, repeats, warm_up=3)["matmul"]
    return 2 * side**3 / statistics.median(times) / 1e12


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runtime = open_session().platform.runtime()
    shape = SHAPES.get(runtime.device_type, SHAPES["cuda"])
    figures = {"matmul_tflops": measure_matmul(shape, arguments.repeats, runtime)}
    for count, length in shape.lengths:
        progress(f"kernels, {count} of {length} tokens")
        figures[f"kernels, {count} of {length}"] = compare_kernels(
            shape, count, length, figures["matmul_tflops"], arguments.repeats, runtime
        )
    figures["sequences"] = rows = {}
    for name, lengths in CASES.items():
        progress(f"{name} tokens")
        rows[name] = measure(lengths, arguments.repeats, runtime)
    report(figures, as_json=arguments.json, runtime=runtime)


if __name__ == "__main__":
    main()
