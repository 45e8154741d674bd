"""Print the reward that a run of verl's has reached, and fail if it is below a bound.

Run as: last_reward.py METRICS BOUND, with the file of verl's logger ``file``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

LAST = 5
"""Steps whose mean is taken: a step has 32 prompts."""


def main(path: str, bound: str) -> int:
    steps = [json.loads(line)["data"] for line in Path(path).read_text().splitlines()]
    rewards = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    last = rewards[-LAST:]
    reward = mean(last)
    greedy = {name: value for step in steps for name, value in step.items() if name.startswith("val-core/")}
    print(f"reward: {rewards[0]:.3f} first, {reward:.3f} in the last {len(last)} steps of {len(rewards)}; {greedy}")
    return int(reward < float(bound))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
