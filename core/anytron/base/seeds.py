"""Derive the seeds of a run's parts from its one seed."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """Derive the seed of a purpose; it is the same in every process and Python version.

    Args:
        seed: ``trainer.seed``.
        purpose: Purpose of the seed, for example ``rollout``.
        index: Step, epoch, or another count.

    Returns:
        A number in ``[0, 2**63)``, which every torch generator accepts.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def response_seed(seed: int, place: int) -> int:
    """The seed of a response, from the step's seed and the place of the response in the step."""
    return derive_seed(seed, "response", place)
