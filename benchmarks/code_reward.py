"""How many programs a second the reward ``code`` scores, in one process; also against another checkout of Anytron.

Each way runs the same programs in an interpreter of its own, in turn: what else the machine does strikes all of them.
``share_of_the_others`` is this checkout's rate by the other's, of the same turn; the median over turns.

    python benchmarks/code_reward.py [--json] [--turns 5] [--programs 20] [--sandbox full] [--against DIRECTORY]
"""

import statistics
import subprocess
import sys
from pathlib import Path

from harness import argument_parser, in_turn, progress, report

HERE = Path(__file__).parents[1]
PROGRAM = "numbers = list(map(int, input().split()))\nprint(sum(number * number for number in numbers))"
SCORE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from anytron.task.rewards.code import Code
from anytron.task.rewards.sample import Sample
code = Code(sandbox=sys.argv[2], test_timeout_s=60.0)
tests = [{"input": "1 2 3", "output": "14"}]
samples = [Sample("p", "?", sys.argv[4], (1,), (1,), (-0.1,), True, data={"tests": tests})] * int(sys.argv[3])
assert code(samples[:1]) == [1.0]
began = time.perf_counter()
assert set(code(samples)) == {1.0}
print(len(samples) / (time.perf_counter() - began))
"""


def rate(checkout, sandbox, programs):
    """Programs a second of the Anytron that lies there."""
    command = [sys.executable, "-c", SCORE, str(checkout / "core"), sandbox, str(programs), PROGRAM]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="how often each way is measured")
    parser.add_argument("--programs", type=int, default=20, help="programs of a measurement")
    parser.add_argument("--sandbox", choices=("full", "reduced"), default="full")
    parser.add_argument("--against", type=Path, help="another checkout of Anytron")
    arguments = parser.parse_args()
    checkouts = {"this": HERE, "other": arguments.against} if arguments.against else {"this": HERE}
    progress(f"{arguments.programs} programs, {arguments.turns} times each")
    ways = {
        name: lambda checkout=checkout: rate(checkout, arguments.sandbox, arguments.programs)
        for name, checkout in checkouts.items()
    }
    rates = in_turn(ways, arguments.turns)
    figures = {f"programs_per_second_{name}": statistics.median(found) for name, found in rates.items()}
    if arguments.against:
        shares = [ours / theirs for ours, theirs in zip(rates["this"], rates["other"], strict=True)]
        figures["share_of_the_others"] = statistics.median(shares)
    report(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
