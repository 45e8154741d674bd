"""Pack and unpack ragged sequences: ours against the per-sequence loop over jagged tensors.

The loop is what peers do (verl/models/mcore/util.py, preprocess_thd_engine): take each sequence out of a
``torch.nested`` jagged tensor by its index, pad it, copy it into the packed buffer; afterwards slice each
one out of the output and build a jagged tensor again. Indexing a jagged tensor costs time in proportion to
its number of sequences; ``unbind_ms`` is the same loop over ``unbind()``, which peers could write.

All sides get the same ragged batch, plan, pack ids and next-token labels, and unpack one float32 value per
token. They run in one process, in turn; the ratios are those of the medians.

    python benchmarks/sequences.py [--json] [--counts 64 256 1024 4096] [--repeats 20]
"""

import statistics

import torch

from anytron.sequences.planning import plan_layout
from harness import argument_parser, in_turn, progress, report, timed

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


def milliseconds(ways, turns):
    """The median of each way."""
    times = in_turn({name: lambda way=way: timed(way)[0] for name, way in ways.items()}, turns)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}


def measure(count, repeats):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(16, 513, (count,), generator=generator)
    sequences = [torch.randint(0, 1000, (length,), generator=generator) for length in lengths.tolist()]
    tokens = torch.cat(sequences)
    nested = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    for mine, theirs in zip(ours(tokens, lengths), loop(nested, torch.Tensor.unbind), strict=True):
        assert torch.equal(mine, theirs), "the two sides compute different things"
    ways = {"ours_ms": lambda: ours(tokens, lengths), "unbind_ms": lambda: loop(nested, torch.Tensor.unbind)}
    times = milliseconds(ways, repeats)
    # A single pass takes half a minute at 4096 sequences.
    loop_ms = statistics.median(
        timed(lambda: loop(nested, indexed))[0] * 1e3 for _ in range(max(1, min(3, 2048 // count)))
    )
    return {
        "tokens": tokens.numel(),
        **times,
        "loop_ms": loop_ms,
        "unbind_by_ours": times["unbind_ms"] / times["ours_ms"],
        "loop_by_ours": loop_ms / times["ours_ms"],
    }


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 1024, 4096], help="numbers of sequences")
    parser.add_argument("--repeats", type=int, default=20, help="measurements of each side")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for count in arguments.counts:
        progress(f"{count} sequences")
        rows[str(count)] = measure(count, arguments.repeats)
    report({"sequences": rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
