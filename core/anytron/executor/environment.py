"""The environment of a worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.executor.bootstrap import Bootstrap
    from anytron.hooks.facade import Hooks

SPIN_COUNT = "30000"
"""How long GNU OpenMP's threads spin for new work, unless the user says: a tenth of its default.

Ranks and the rollout process take turns on the same processors: with the default, the threads of the one that
has just finished spin for milliseconds on the cores of the next (12% of a step of examples/grpo_sort.yaml).
"""


def worker_environment(inherited: Mapping[str, str], bootstrap: Bootstrap, hooks: Hooks) -> dict[str, str]:
    """Make the environment of a worker.

    Args:
        inherited: What it has from the driver, or from its machine.
        bootstrap: Which worker it is.
        hooks: The driver's plugins, which add to it.
    """
    return {
        "GOMP_SPINCOUNT": SPIN_COUNT,
        **inherited,
        **hooks.runtime_env(bootstrap.process),
        "OMP_NUM_THREADS": str(bootstrap.num_threads),
        "PYTHONUNBUFFERED": "1",  # a process that is killed leaves all it wrote in its log
    }
