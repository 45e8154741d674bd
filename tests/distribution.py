"""Which tests run in the same process when pytest-xdist runs several."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

RANKS = tuple(
    f"tests/backends/megatron/{folder}/" for folder in ("checkpoint", "engine", "experts", "families", "lora")
)
"""Folders whose tests build engines on the ranks of :mod:`tests.backends.megatron.ranks`."""


class FilesAndRanks(LoadFileScheduling):
    """Keeps the tests of a file together, for they share fixtures, and all tests that share ranks.

    Two processes with ranks of their own would start every rank twice, and process groups cost processor time
    even while nobody uses them: each of gloo's wakes up a hundred times a second.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.startswith(RANKS) else super()._split_scope(nodeid)
