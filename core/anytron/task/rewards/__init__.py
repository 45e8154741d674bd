"""Rewards: functions that score responses.

A reward is a function of samples::

    from anytron.tasks import Sample

    def length(samples: Sequence[Sample], target: int) -> list[float]:
        return [-abs(len(sample.response_tokens) - target) for sample in samples]

The configuration names it by import path in ``rewards[].function``; its keyword arguments are ``rewards[].options``.
"""

from anytron.task.rewards.sample import Sample

__all__ = ["Sample"]
