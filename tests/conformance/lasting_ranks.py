"""Worker processes that serve one platform after another, because a start takes longer than the work.

An engine is built on the platform that its configuration names. What is imported and the patches that come before an
import stay; every other patch is undone with its platform, and kernels are asked for anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

from anytron.engines import context as engines
from anytron.executor import worker
from anytron.executor.local import LocalExecutor
from anytron.hooks.types import PatchContext
from anytron.patches import Ledger, Phase
from anytron.plugins import open_session

FOLDER = "ANYTRON_TEST_PLATFORMS"
"""Variable that names the folder in which each platform's distribution has a folder of its name."""
START = "import sys; sys.path[:] = filter(None, sys.path); from tests.conformance.lasting_ranks import run; run()"


class LastingProcesses(LocalExecutor):
    """Builds engines in processes that an earlier executor has left, if they still run."""

    left: ClassVar[dict] = {}

    def start(self, spec):
        place = (spec.role, spec.engine_name, spec.world_size, spec.replica)
        group = self.left.get(place)
        if group is None or group.ended:
            self.left[place] = super().start(spec)
        else:
            group.rebuild(self._config)
            self._groups.append(group)
        return self.left[place]

    def close(self):
        self._groups.clear()

    def _leave(self):
        self._groups.clear()

    @classmethod
    def end_all(cls):
        """End all that still run."""
        while cls.left:
            cls.left.popitem()[1].end()


class ItsPlatform:
    """Makes the contexts of engines, each on the platform of its configuration."""

    make = engines.EngineContext

    def __init__(self):
        self._name = None

    def __call__(self, *, config, hooks, platform, ledger, process, init_method):
        """Arguments as the worker gives them, with the platform that it started with."""
        if process.role != "trainer":
            return self.make(config, hooks, platform, ledger, process, init_method)
        if self._name != config.platform.name:
            from anytron_megatron.portable_te.binding import bind

            (ledger if self._name is None else self._ledger).undo(Phase.BEFORE_PARALLEL_INIT)
            sys.path.append(str(Path(os.environ[FOLDER], config.platform.name)))
            session = open_session(config.platform.name, config.platform.options, config.engine.name)
            context = PatchContext(session.platform, "trainer", session.hooks, config.engine.name)
            self._name, self._session, self._ledger = config.platform.name, session, Ledger(context=context)
            self._ledger._reached = Phase.BEFORE_IMPORT
            bind(session.hooks, session.platform.runtime().device_type)
        return self.make(config, self._session.hooks, self._session.platform, self._ledger, process, init_method)


def run():
    """Run as a worker."""
    engines.EngineContext = ItsPlatform()
    worker.run()
