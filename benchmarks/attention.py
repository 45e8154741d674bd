"""Packed attention, forward and backward: every kernel of this device, and one call per sequence.

``kernels``: causal sequences of one length, so that torch's ``scaled_dot_product_attention`` has a form for them too:
the row ``torch, dense``. ``ours`` is what the platform gives a model's layers; the other rows are the kernels that it
can choose from, and those that end in ``, direct`` call a library with what its adapter would have made of the call.
``tflops`` counts 4 * length^2 / 2 * heads * head size per sequence forward and 2.5 times that backward, as
FlashAttention's own benchmark does (its benchmarks/benchmark_flash_attention.py, ``flops``); ``by_matmul`` divides it
by what a large matrix product reaches here, ``by_torch`` by the dense row, ``by_direct`` by the fastest direct one, or
by the dense row where no library is installed. On a GPU the calls of a measurement follow each other without waiting,
as those of a model's layers do. A kernel that fails has no row, and the benchmark ends with status 1.

``sequences``: ours against a loop. The loop is what a packed batch costs without a variable-length kernel (the portable
Transformer Engine's first sketch did it): slice each sequence out, ``scaled_dot_product_attention``, concatenate.
``first_ms`` is a micro-batch's first layer, which plans the groups; ``ours_ms`` a later one.

The single figures are the least of our rows. All ways run in one process, in turn; ratios are those of the medians.

    python benchmarks/attention.py [--json] [--repeats 10] [--threads 1]
"""

import functools
import statistics
import traceback
from itertools import accumulate
from typing import NamedTuple

import torch

from anytron.base.traits import ModelTraits
from anytron.device.loading import open_session
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionCall, AttentionSpec
from harness import argument_parser, in_turn, progress, report, timed

BY = ("by_direct", "by_torch", "by_matmul")
TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


class Layer(NamedTuple):
    """An attention layer."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int

    def spec(self, device_type):
        scale = self.size**-0.5
        return AttentionSpec(
            self.heads, self.kv_heads, self.size, self.size, scale, ModelTraits(), device_type=device_type
        )

    def operands(self, tokens, device):
        """Queries, keys and values, which want gradients, and the output's gradient."""
        made = [
            torch.randn(tokens, heads, self.size, device=device, dtype=self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        return [one.requires_grad_() for one in made[:3]], made[3]


class Task(NamedTuple):
    """What is measured on a type of device.

    Attributes:
        layer: Of ``kernels``.
        shapes: Of ``kernels``: number of sequences and their length.
        ragged_layer: Of ``sequences``.
        ragged: Of ``sequences``: lengths by name.
        matmul: Rows and columns of the large matrices.
        calls: Of one measurement.
    """

    layer: Layer
    shapes: tuple[tuple[int, int], ...]
    ragged_layer: Layer
    ragged: dict[str, list[int]]
    matmul: int
    calls: int


def ragged(count, low, high):
    return torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def tasks():
    """By type of device; others take that of ``cuda``, a layer of an 8-billion-parameter model."""
    large = Layer(torch.bfloat16, 32, 8, 128)
    return {
        "cpu": Task(
            Layer(torch.float32, 4, 2, 64),
            ((4, 256),),
            Layer(torch.float32, 4, 2, 16),
            {
                "512 of 9": [9] * 512,
                "512 of 8-16": ragged(512, 8, 16),
                "512 of 4-128": ragged(512, 4, 128),
                "512 of 16-512": ragged(512, 16, 512),
                "32 of 16-512": ragged(32, 16, 512),
            },
            matmul=1024,
            calls=1,
        ),
        # Few different lengths: where torch chooses cuDNN, the loop compiles for each of them.
        "cuda": Task(
            large,
            ((16, 1024), (4, 4096), (1, 16384)),
            large,
            {"512 of 64": [64] * 512, "32 of 16-512": ragged(32, 16, 512), "16 of 256-4096": ragged(16, 256, 4096)},
            matmul=8192,
            calls=10,
        ),
    }


def repeated(count, call):
    """Call; return the last result."""
    for _ in range(count - 1):
        call()
    return call()


def attempt(what, call, failed):
    """The result of a call; if it fails, None, and ``what`` is added to ``failed``."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - whatever a library raises, the others' figures count
        progress(f"{what}: {traceback.format_exc()}")
        failed.append(what)
        return None


def loop(query, key, value, lengths):
    parts = []
    for sequence in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        batched = [x.transpose(0, 1)[None] for x in sequence]
        output = torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)


def measure(layer, lengths, repeats, hooks, runtime):
    device = runtime.current_device()
    operands, cotangent = layer.operands(sum(lengths), device)
    attend = hooks.attention_kernel(layer.spec(runtime.device_type))
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def ours(cu_seqlens):
        call = AttentionCall("thd", "padding_causal", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        return lambda *inputs: attend(*inputs, call)

    def per_sequence(*inputs):
        return loop(*inputs, lengths)

    torch.testing.assert_close(ours(cumulative)(*operands), per_sequence(*operands), **TOLERANCES[layer.dtype])

    def seconds(forward):
        return timed(lambda: torch.autograd.grad(forward(*operands), operands, cotangent), runtime)[0]

    ways = {
        "first_ms": lambda: seconds(ours(cumulative.clone())),
        "ours_ms": lambda: seconds(ours(cumulative)),
        "loop_ms": lambda: seconds(per_sequence),
    }
    medians = {name: statistics.median(times) * 1e3 for name, times in in_turn(ways, repeats).items()}
    return {**medians, "loop_by_ours": medians["loop_ms"] / medians["ours_ms"]}


def kernels_of(spec, count, length, hooks, runtime):
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

    made["ours"] = hooks.attention_kernel(spec)
    ours = {name: functools.partial(kernel, call=call) for name, kernel in made.items()}
    return {"torch, dense": dense, **direct, **ours}


def compare_kernels(task, count, length, matmul_tflops, repeats, hooks, runtime, failed):
    layer, calls = task.layer, task.calls
    operands, cotangent = layer.operands(count * length, runtime.current_device())

    def seconds(kernel):
        """Of a forward pass, and of its backward pass."""
        forward, output = timed(lambda: repeated(calls, lambda: kernel(*operands)), runtime)
        gradients = functools.partial(torch.autograd.grad, output, operands, cotangent, retain_graph=True)
        backward, _ = timed(lambda: repeated(calls, gradients), runtime)
        return forward / calls, backward / calls

    kernels = kernels_of(layer.spec(runtime.device_type), count, length, hooks, runtime)
    ways = {name: functools.partial(seconds, kernel) for name, kernel in kernels.items()}
    ways = {name: way for name, way in ways.items() if attempt(f"{name}, {count} of {length}", way, failed)}
    rows = {}
    for name, times in in_turn(ways, repeats).items():
        forward, backward = (statistics.median(side) for side in zip(*times, strict=True))
        operations = 4 * length**2 / 2 * layer.heads * layer.size * count * 3.5
        tflops = operations / (forward + backward) / 1e12
        rows[name] = {"forward_ms": forward * 1e3, "backward_ms": backward * 1e3, "tflops": tflops}
    dense = rows["torch, dense"]["tflops"]
    direct = max((row["tflops"] for name, row in rows.items() if name.endswith("direct")), default=dense)
    for row in rows.values():
        row |= {name: row["tflops"] / by for name, by in zip(BY, (direct, dense, matmul_tflops), strict=True)}
    return rows


def measure_matmul(task, repeats, runtime):
    """What a large matrix product reaches, in TFLOP/s."""
    side = task.matmul
    one, other = (torch.randn(side, side, device=runtime.current_device(), dtype=task.layer.dtype) for _ in range(2))
    out = torch.empty_like(one)

    products = functools.partial(repeated, task.calls, lambda: torch.mm(one, other, out=out))
    times = in_turn({"matmul": lambda: timed(products, runtime)[0]}, repeats, warm_up=3)["matmul"]
    return 2 * side**3 * task.calls / statistics.median(times) / 1e12


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    session = open_session()
    hooks, runtime = session.hooks, session.platform.runtime()
    task = tasks().get(runtime.device_type) or tasks()["cuda"]
    matmul_tflops = measure_matmul(task, arguments.repeats, runtime)
    by_shape, sequences, failed = {}, {}, []
    for count, length in task.shapes:
        progress(f"kernels, {count} of {length} tokens")
        by_shape[f"kernels, {count} of {length}"] = compare_kernels(
            task, count, length, matmul_tflops, arguments.repeats, hooks, runtime, failed
        )
    progress(f"ours: {hooks.kernel_descriptions() or 'neutral'}")
    for name, lengths in task.ragged.items():
        progress(f"{name} tokens")
        row = attempt(name, lambda n=lengths: measure(task.ragged_layer, n, arguments.repeats, hooks, runtime), failed)
        if row:
            sequences[name] = row
    ours = [rows["ours"] for rows in by_shape.values() if "ours" in rows]
    least = {f"ours_{name}": min(row[name] for row in ours) for name in BY if ours}
    if sequences:
        least["loop_by_ours"] = min(row["loop_by_ours"] for row in sequences.values())
    figures = {"matmul_tflops": matmul_tflops, **least, **by_shape, "sequences": sequences}
    report(figures, as_json=arguments.json, runtime=runtime)
    if failed:
        raise SystemExit(f"These have failed, their tracebacks are above: {'; '.join(failed)}.")


if __name__ == "__main__":
    main()
