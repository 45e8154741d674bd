"""How the driver's plan of micro-batches grows: sequences of a step over replicas, by a long-tailed law of lengths.

A plan is made for every scoring pass and every mini-batch. Lengths are log-normal (median 1,100 tokens, at most 8,192),
micro-batches of 16,384 tokens, 128 sequences a replica. ``balance`` is the fullest replica by the mean, ``filled`` the
share of the micro-batches' limit that tokens take.

    python benchmarks/planning.py [--json] [--counts 512 4096 16384 65536] [--repeats 5]
"""

import statistics

import torch

from anytron.run.trainer.updates import micro_batches
from harness import argument_parser, progress, report, timed

LIMIT, LONGEST, OF_A_REPLICA = 16384, 8192, 128


def measure(count, repeats, padded):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.empty(count).log_normal_(7.0, 0.8, generator=generator).long().clamp(1, LONGEST).tolist()
    replicas = max(1, count // OF_A_REPLICA)
    times, shares = zip(
        *(timed(lambda: micro_batches(lengths, LIMIT, replicas, padded=padded)) for _ in range(repeats)), strict=True
    )

    def tokens(part):
        sizes = [lengths[index] for index in part]
        return len(sizes) * max(sizes, default=0) if padded else sum(sizes)

    work = [sum(map(tokens, share)) for share in shares[0]]
    seconds = statistics.median(times)
    return {
        "replicas": replicas,
        "micro_batches": len(shares[0][0]),
        "seconds": seconds,
        "us_a_sequence": seconds / count * 1e6,
        "balance": max(work) * replicas / sum(work),
        "filled": sum(lengths) / (len(shares[0][0]) * replicas * LIMIT),
    }


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[512, 4096, 16384, 65536], help="numbers of sequences")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    arguments = parser.parse_args()
    figures = {}
    for title, padded in (("packed", False), ("padded", True)):
        rows = {}
        for count in arguments.counts:
            progress(f"{count} sequences, {title}")
            rows[str(count)] = measure(count, arguments.repeats, padded)
        first, *_, last = rows.values()
        figures |= {f"{title}_growth": last["us_a_sequence"] / first["us_a_sequence"], title: rows}
    report(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
