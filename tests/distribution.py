"""Which tests run in the same process when pytest-xdist runs several, and which files begin first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

RANKS = tuple(
    f"tests/backends/megatron/{folder}/" for folder in ("checkpoint", "engine", "experts", "families", "lora")
)
"""Folders whose tests build engines on the ranks of :mod:`tests.backends.megatron.ranks`."""
LONG = (
    "tests/invented_device/test_platform.py",
    "tests/plugins/test_wheels.py",
    "tests/backends/ray/test_ray.py",
    "tests/verification/test_verify.py",
    "tests/backends/megatron/test_launch.py",
    "tests/conformance/test_verified.py",
    "tests/demo/test_grpo_sort.py",
    "tests/core/cli/test_serve_command.py",
)
"""Files of few tests that take long. xdist begins with the files of most tests, so that these would be left for the
end, and one process would work on the last of them while the others have nothing to do."""


class FilesAndRanks(LoadFileScheduling):
    """Keeps the tests of a file together, for they share fixtures, and all tests that share ranks.

    Two processes with ranks of their own would start every rank twice, and process groups cost processor time
    even while nobody uses them: each of gloo's wakes up a hundred times a second.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.startswith(RANKS) else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = next((scope for scope in ("ranks", *LONG) if scope in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
