"""Engines that do what a test asks for, good or bad."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import testchip
import torch
import torch.distributed as dist

from anytron.algorithms.registered import LOSS, call
from anytron.base.errors import DataError


class DerivedError(DataError):
    """Its module exists in workers only."""


class Engine:
    def __init__(self, context):
        testchip.EVENTS.append(("built", context.process.rank))
        self.context = context
        refuse = context.config.engine.options.get("refuse")
        if refuse is not None:
            raise ValueError(refuse)
        self.rank = context.process.rank

    def describe(self):
        c = self.context
        return {
            "events": testchip.EVENTS,
            "env": dict(os.environ),
            "steps": c.config.trainer.total_steps,
            "platform": c.stack.platform.name,
            "patches": [r["id"] for r in c.stack.ledger.report()],
            "threads": torch.get_num_threads(),
            "process": (c.process.role, c.process.rank, c.process.local_rank, c.process.world_size),
            "pid": os.getpid(),
            "init_method": c.init_method,
        }

    def echo(self, *args, **kwargs):
        return self.rank, args, kwargs

    def work(self, seconds):
        time.sleep(seconds)
        return self.rank

    def fail(self, rank, derived=False):
        if self.rank == rank:
            raise DerivedError("bad data", where="here", fix="mend it") if derived else ValueError("engine says no")
        time.sleep(60)

    def exit(self, rank, status):
        if self.rank == rank:
            print("last words of the engine", flush=True)
            os._exit(status)
        time.sleep(60)

    def kill(self, rank, after_s=0.1):
        """Its peers complain, as collectives do, before its end is noticed; long before, on a busy machine."""
        if self.rank != rank:
            raise RuntimeError("Connection closed by peer")
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after_the_answer(self, rank):
        if self.rank == rank:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        time.sleep(1.0)
        raise RuntimeError("Connection closed by peer")

    def meet(self):
        """Join a process group where the executor says, and add up the ranks."""
        total = torch.tensor(self.rank)
        world_size = self.context.process.world_size
        dist.init_process_group("gloo", init_method=self.context.init_method, rank=self.rank, world_size=world_size)
        dist.all_reduce(total)
        return int(total)

    def follow(self, plans):
        """Do what a plan for each rank says: collectives of all ranks, and work that takes so many seconds."""
        if not dist.is_initialized():
            self.meet()
        value, until = torch.ones(3), time.monotonic
        for act, *seconds in plans[self.rank]:
            end = until() + (seconds[0] if seconds else 0.0)
            if act == "sleep":  # as in reading a file or waiting for a compiler's process
                time.sleep(seconds[0])
            while act == "python" and until() < end:
                sum(range(1000))
            while act == "library" and until() < end:  # in C, without Python's lock
                torch.linalg.matrix_power(torch.eye(500), 1 << 16)
            if act == "begin all_reduce":
                dist.all_reduce(value, async_op=True)
            if hasattr(dist, act):
                getattr(dist, act)(value, *([0] if act == "broadcast" else []))
        return self.rank

    def hang_in_this_function(self, rank):
        if self.rank == rank:
            time.sleep(60)

    def child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False).pid

    def allocate(self, size):
        torch.empty(size)

    def allocate_in_a_loss(self, size):
        call(LOSS, "mine.py:loss", torch.empty, size)

    def unpicklable(self):
        return lambda: None

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()
        path = self.context.config.engine.options.get("closed")
        if path:
            Path(f"{path}.{self.rank}").write_text("closed")


class HugeEngine:
    def __init__(self, context):
        torch.empty(2**50)


class BrokenEngine:
    def __init__(self, context):
        raise RuntimeError("no such model")


class SlowEngine:
    def __init__(self, context):
        time.sleep(60)


class RefusingEngine:
    def __init__(self, context):
        raise DerivedError("this engine refuses", fix="take another")
