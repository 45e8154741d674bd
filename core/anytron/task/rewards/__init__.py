"""Scores of responses.

A reward is a function of samples::

    from anytron.tasks import Sample

    def length(samples: Sequence[Sample], target: int) -> list[float]:
        return [-abs(len(sample.response_tokens) - target) for sample in samples]

named in the configuration by import path, its keyword arguments in ``rewards[].options``.
"""

from anytron.task.rewards.sample import Sample

__all__ = ["Sample"]
