"""Worker processes of the tests: a throw-away distribution with a platform and small engines.

It is a directory with a ``.dist-info``, found through ``sys.path`` as an installed one is; nothing
of it is a mock: the workers are real processes that go through the real bootstrap.
"""

import sys
import textwrap

import pytest

from anytron.config.schema import RunConfig
from anytron.executor.local import LocalExecutor
from anytron.plugins import open_session

MODULE = """
import os, signal, subprocess, sys, time

EVENTS = [("imported", "torch" in sys.modules)]

from anytron import Platform, hookimpl
from anytron.errors import DataError
from anytron.patches import Patch
from anytron.platform import Availability, Probe

class Options:
    pass

class TestChip(Platform):
    name = "testchip"
    accelerator = True

    def probe(self):
        return Probe(Availability.USABLE, "the tests brought it", devices=8)

    def runtime(self):
        raise NotImplementedError

    @hookimpl
    def runtime_env(self, process):
        return {"TESTCHIP_RANK": f"{process.role}:{process.rank}/{process.world_size}"}

    @hookimpl
    def patch_model(self, phase, context):
        if phase.value != "before_import":
            return []
        def install():
            EVENTS.append(("patched", context.role, "testchip_engine" in sys.modules))
            return lambda: None
        return [Patch(id="testchip.mark", owner="testchip", target="testchip_engine", phase=phase,
                      reason="the tests look at the order", install=install)]
"""

ENGINE = '''
import os, signal, subprocess, sys, time
import testchip
from anytron.errors import DataError

class DerivedError(DataError):
    """Its module exists in workers only."""

class Engine:
    def __init__(self, context):
        testchip.EVENTS.append(("built", context.process.rank))
        self.context = context
        self.rank = context.process.rank

    def describe(self):
        import torch
        c = self.context
        return dict(events=testchip.EVENTS, env=dict(os.environ), base_dir=str(c.base_dir), steps=c.config.trainer.total_steps,
                    platform=c.platform.name, patches=[r["id"] for r in c.ledger.report()], threads=torch.get_num_threads(),
                    process=(c.process.role, c.process.rank, c.process.local_rank, c.process.world_size), pid=os.getpid())

    def echo(self, *args, **kwargs):
        return self.rank, args, kwargs

    def fail(self, rank, derived=False):
        if self.rank == rank:
            raise DerivedError("bad data", where="here", fix="mend it") if derived else ValueError("engine says no")
        time.sleep(60)

    def exit(self, rank, status):
        if self.rank == rank:
            print("last words of the engine", flush=True)
            os._exit(status)
        time.sleep(60)

    def kill(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def hang_in_this_function(self, rank):
        if self.rank == rank:
            time.sleep(60)

    def child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False).pid

    def unpicklable(self):
        return lambda: None

    def close(self):
        path = self.context.config.engine.options.get("closed")
        if path:
            with open(f"{path}.{self.rank}", "w") as file:
                file.write("closed")

class BrokenEngine:
    def __init__(self, context):
        raise RuntimeError("no such model")

class SlowEngine:
    def __init__(self, context):
        time.sleep(60)
'''

ENTRY_POINTS = """
[anytron.platforms]
testchip = testchip:TestChip
[anytron.training_engines]
small = testchip_engine:Engine
broken = testchip_engine:BrokenEngine
slow = testchip_engine:SlowEngine
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install the throw-away distribution for this process and its workers."""
    site = tmp_path / "site"
    info = site / "testchip-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: testchip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    (site / "testchip.py").write_text(MODULE)
    (site / "testchip_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "cpu,megatron")
    yield site
    for name in ("testchip", "testchip_engine"):
        sys.modules.pop(name, None)


@pytest.fixture
def make_executor(distribution, tmp_path):
    """Make executors; keyword arguments are keys of the ``executor`` section."""
    made = []

    def make(engine_options=None, **settings):
        config = RunConfig.model_validate(
            {
                "model": {"config": {"model_type": "none"}, "tokenizer": "none"},
                "data": {"source": "none"},
                "rewards": [{"function": "none"}],
                "engine": {"options": engine_options or {}},
                "executor": settings,
                "trainer": {"total_steps": 7, "output_dir": str(tmp_path / "run")},
            }
        )
        executor = LocalExecutor(config, tmp_path, open_session(platform="testchip"))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


@pytest.fixture
def start(make_executor):
    """Start a group of small engines."""

    def start(ranks=2, engine="small", **settings):
        return make_executor(**settings).start("trainer", "anytron.training_engines", engine, ranks, 1)

    return start
