"""Pack and unpack ragged sequences: ours against the per-sequence loop over jagged tensors.

The loop is what peers do (verl/models/mcore/util.py, preprocess_thd_engine): take each sequence out of a
``torch.nested`` jagged tensor by its index, pad it, copy it into the packed buffer; afterwards slice each
one out of the output and build a jagged tensor again. Indexing a jagged tensor costs time in proportion to
its number of sequences; ``unbind_ms`` is the same loop over ``unbind()``, which peers could write.

All sides get the same ragged batch, plan, pack ids and next-token labels, and unpack one float32 value per
token. They run in one process, in turn; the ratios are those of the medians.

    python benchmarks/sequences.py [--json] [--counts 64 256 1024 4096] [--repeats 20]
"""

import argparse
import json
import statistics
import time

import torch

from anytron.sequences import plan_layout

TENSOR_PARALLEL = 2


def ours(tokens, lengths):
    layout = plan_layout(lengths, tensor_parallel=TENSOR_PARALLEL)
    ids = layout.pack(tokens)
    labels = layout.next_tokens(tokens)
    values = layout.unpack(ids.float())
    return ids, labels, values


def indexed(nested):
    return (nested[index] for index in range(nested.shape[0]))


def loop(nested, sequences):
    lengths = nested.offsets().diff()
    padded = (lengths + TENSOR_PARALLEL - 1) // TENSOR_PARALLEL * TENSOR_PARALLEL
    starts = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    ids = torch.zeros(int(padded.sum()), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for index, sequence in enumerate(sequences(nested)):
        start, length = starts[index].item(), lengths[index].item()
        ids[start : start + length] = sequence
        labels[start : start + length - 1] = sequence[1:]
    output = ids.float()
    pieces = [
        output[starts[index].item() : starts[index].item() + lengths[index].item()] for index in range(len(lengths))
    ]
    values = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    return ids[None], labels[None], values.values()


def milliseconds(function, *arguments):
    began = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - began) * 1e3


def measure(count, repeats):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(16, 513, (count,), generator=generator)
    sequences = [torch.randint(0, 1000, (length,), generator=generator) for length in lengths.tolist()]
    tokens = torch.cat(sequences)
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    for mine, theirs in zip(ours(tokens, lengths), loop(nested, torch.Tensor.unbind), strict=True):
        assert torch.equal(mine, theirs), "the two sides compute different things"
    ours_ms = statistics.median(milliseconds(ours, tokens, lengths) for _ in range(repeats))
    unbind_ms = statistics.median(milliseconds(loop, nested, torch.Tensor.unbind) for _ in range(repeats))
    # A single pass takes half a minute at 4096 sequences.
    loop_ms = statistics.median(milliseconds(loop, nested, indexed) for _ in range(max(1, min(3, 2048 // count))))
    return {
        "sequences": count,
        "tokens": tokens.numel(),
        "ours_ms": round(ours_ms, 3),
        "loop_ms": round(loop_ms, 3),
        "ratio": round(loop_ms / ours_ms, 1),
        "unbind_ms": round(unbind_ms, 3),
        "unbind_ratio": round(unbind_ms / ours_ms, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 1024, 4096], help="numbers of sequences")
    parser.add_argument("--repeats", type=int, default=20, help="measurements of each side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(count, arguments.repeats) for count in arguments.counts]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
