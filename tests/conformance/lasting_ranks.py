"""Worker processes that serve one platform after another, because a start takes longer than the work.

An engine is built on the platform that its configuration names. What is imported and patched stays, so that a platform
with patches of its own, or with another runtime, needs processes of its own. What :meth:`Mutant.breaks` exchanges is
put back before the next engine is built.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from anytron.device.loading import open_session
from anytron.device.stack import DeviceStack
from anytron.workers.engines import context as engines
from anytron.workers.executor import worker
from anytron.workers.executor.local import LocalExecutor

if TYPE_CHECKING:
    from anytron.device.hooks.facade import Hooks

FOLDER = "ANYTRON_TEST_PLATFORMS"
"""Variable that names the folder in which each platform's distribution has a folder of its name."""
START = "import sys; sys.path[:] = filter(None, sys.path); from tests.conformance.lasting_ranks import run; run()"


class LastingProcesses(LocalExecutor):
    """Builds engines in processes that an earlier executor has left, if they still run."""

    left: ClassVar[dict] = {}

    def warm_up(self, specs):
        """Start nothing: what an earlier executor has left is warm."""

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


class Kernels:
    """Asks the platform of the present engine for kernels; patches keep theirs, so that they ask at each call."""

    hooks: ClassVar[Hooks]

    @property
    def invariant(self):
        return self.hooks.invariant

    def attention_kernel(self, spec):
        return self.hooks.attention_kernel(spec)

    def log_prob_kernel(self, spec):
        return self.hooks.log_prob_kernel(spec)

    def fused_kernel(self, name, spec):
        def ask(*tensors, **settings):
            kernel = self.hooks.fused_kernel(name, spec)
            return kernel(*tensors, **settings)

        return ask


class ItsPlatform:
    """Makes the contexts of engines, each on the platform of its configuration."""

    make = engines.EngineContext

    def __init__(self):
        self._session = None
        self._broken = ExitStack()

    def __call__(self, *, config, stack, process, init_method):
        """Arguments as the worker gives them, with the platform that it started with."""
        self._broken.close()
        name = config.platform.name
        if (folder := str(Path(os.environ[FOLDER], name))) not in sys.path and Path(folder).is_dir():
            sys.path.append(folder)
        for found in entry_points(group="anytron.platforms", name=name) if Path(folder).is_dir() else ():
            self._broken.enter_context(found.load().breaks(process.role))
        if process.role != "trainer":
            return self.make(config, stack, process, init_method)
        if self._session is None or self._session.platform.name != name:
            from anytron_megatron.portable_te.binding import bind

            self._session = open_session(name, config.platform.options, config.engine.name)
            Kernels.hooks = self._session.hooks
            stack.ledger.context = replace(stack.ledger.context, platform=self._session.platform, kernels=Kernels())
            bind(Kernels(), self._session.platform.runtime().device_type)
        return self.make(config, DeviceStack(self._session, stack.ledger), process, init_method)


def run():
    """Run as a worker."""
    engines.EngineContext = ItsPlatform()
    worker.run()
