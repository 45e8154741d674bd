"""The reward in verl's format."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Return the fraction of positions that hold the right digit."""
    del data_source, extra_info
    right = sum(given == wanted for given, wanted in zip(solution_str, ground_truth, strict=False))
    return right / len(ground_truth)
