"""A worker process, started by :class:`anytron.workers.executor.process.WorkerProcess`.

The order matters. The first message is plain JSON. It determines the environment, the plugins, and the
patches that must be applied before an engine is imported. Then the engine is imported. The second message, JSON too,
makes this process build the engine. If the process has kept its output in memory until then, the message also names
the log for it. Only after that does this process unpickle messages, because unpickling imports any module that a
message names.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from anytron.base.errors import ConfigError
from anytron.base.files import open_to_append
from anytron.base.garbage import exempt_objects, no_collections
from anytron.base.terminal import make_output_visible
from anytron.base.version import __version__, installable
from anytron.workers.executor.address import register
from anytron.workers.executor.channel import (
    Bootstrap,
    Build,
    Call,
    Failure,
    Message,
    Rebuild,
    Result,
    decode,
    encode,
    receive_json,
)
from anytron.workers.executor.heartbeat import BEAT_S, Heartbeat, StandingReporter
from anytron.workers.executor.observer import BUILDING, OBSERVED, MemoryExplainer, RankObserver

if TYPE_CHECKING:
    from collections.abc import Callable

    EngineBuilder = Callable[[dict[str, Any], str], Any]

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads to its log; sent to a rank that does not answer."""


class Parts(NamedTuple):
    """The objects with which a worker serves calls, made when its engine has been imported.

    Attributes:
        build: Function that builds the engine, from a configuration (JSON values) and the ``init_method`` of
            ``torch.distributed``.
        observer: Observer that marks each call as a range in profilers, and implements the methods in
            :data:`~anytron.workers.executor.observer.OBSERVED` for any engine. It uses the device on training ranks
            only, because other engines may do without the device.
        memory: Explainer of the device's out-of-memory errors.
    """

    build: EngineBuilder
    observer: RankObserver
    memory: MemoryExplainer


class EngineHolder:
    """Holds the engine of this process, as the only object that does: a rebuild can free the old engine's memory first.

    Args:
        build: Function that builds an engine.
    """

    def __init__(self, build: EngineBuilder) -> None:
        self._build = build
        self._engine: Any = None
        self._exempt = 0  # objects, without the engine's

    def build(self, config: dict[str, Any], init_method: str) -> None:
        """Close and free the engine, if there is one, and build another."""
        if self._engine is not None:
            self.close()
            self._engine = None
            self._free()
        elif self._exempt:  # the last build failed, and may have left parts of an engine
            exempt_objects()
        self._exempt = gc.get_freeze_count()
        self._engine = self._build(config, init_method)
        if self._exempt:
            gc.collect()
        else:
            exempt_objects()

    def answer(self, call: Call, observer: RankObserver) -> Message:
        """Call a method of the engine, or of the observer, and return the pickled result."""
        target = observer if call.method in OBSERVED else self._engine
        with observer.marked(call.method):
            result = getattr(target, call.method)(*call.args, **call.kwargs)
        return encode(Result(result))

    def _free(self) -> None:
        """Collect the parts of an engine, which refer to each other: the next engine wants their memory.

        Python's modules are many times as many objects. They are looked at only if the engine is exempt like them: the
        engine of the first build is, and one whose build applied patches.
        """
        if gc.get_freeze_count() > self._exempt:
            exempt_objects()
        else:
            gc.collect()

    def close(self) -> None:
        """Close the engine, if it has a method ``close``."""
        close = getattr(self._engine, "close", None)
        if close is not None:
            close()


def run() -> NoReturn:
    """Run a worker. The command line has two file descriptors: the channel's and the heartbeat memory's."""
    status = main(*map(int, sys.argv[1:]))
    with contextlib.suppress(OSError):  # a full disk
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: process groups that modules still refer to (mcore-bridge keeps one in a global) take
    # their gloo threads into the interpreter's end, which is std::terminate.
    os._exit(status)


def main(channel: int, heartbeat_memory: int) -> int:
    """Bootstrap, build the engine, and answer calls until the driver stops it.

    Args:
        channel: This process's end of the socket pair.
        heartbeat_memory: File descriptor of the memory from :func:`anytron.workers.executor.heartbeat.shared_memory`.

    Returns:
        Exit status: 0 after an orderly stop.
    """
    os.set_inheritable(channel, False)  # a process started by the engine must not keep the channel open
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    # Schedulers send SIGTERM to every process of a job. The driver decides: it may want a checkpoint first. Not
    # SIG_IGN, which processes that the engine starts would inherit.
    signal.signal(signal.SIGTERM, _stay)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ends this process, also where nohup started the driver
    early = os.dup(1)  # a library may redirect this process's output later
    connection, heartbeat = Connection(channel), Heartbeat(heartbeat_memory)
    os.close(heartbeat_memory)
    told = receive_json(connection)
    if told["version"] != __version__:
        connection.send_bytes(encode(_other_version(told)))
        return 1
    bootstrap = Bootstrap(**told)
    threading.Thread(target=_watch, args=(channel, heartbeat), name="anytron-watch", daemon=True).start()
    memory: MemoryExplainer | None = None
    try:
        with no_collections():  # it imports the engine
            parts = start(bootstrap)
        memory = parts.memory
        build = Build(**receive_json(connection))
        if build.log is not None:
            _move_output(early, Path(build.log))
        os.close(early)
        holder = EngineHolder(parts.build)
        holder.build(bootstrap.config, build.init_method)
    except Exception as error:  # noqa: BLE001 - reported to the driver, which ends the run
        connection.send_bytes(encode(_failure(error, memory, BUILDING)))
        return 1
    heartbeat.beat()
    heartbeat.answers += 1
    connection.send_bytes(encode(Result(None)))
    return _serve(connection, heartbeat, holder, parts)


def start(bootstrap: Bootstrap) -> Parts:
    """Do everything that must happen before the first unpickling; the last step imports the engine."""
    os.environ.update(bootstrap.distributed_env())
    if bootstrap.python is None:
        sys.path[:] = bootstrap.sys_path
    make_output_visible()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from anytron.config.schema import RunConfig
    from anytron.device.loading import open_process
    from anytron.device.stack import enter_device_stack

    run, engine_name = RunConfig.model_validate(bootstrap.config), bootstrap.engine_name
    session = open_process(bootstrap.process, run, platform=bootstrap.platform, engine=engine_name)
    stack = enter_device_stack(session, bootstrap.role, engine_name)

    import torch

    from anytron.base.components import engine_info
    from anytron.workers.engines.context import EngineContext

    torch.set_num_threads(bootstrap.num_threads)
    register()
    info = engine_info(bootstrap.engine_group, bootstrap.engine_name, "engine")
    if bootstrap.model == "reward_model":
        assert info.reward_model is not None, "an engine without one is refused before"
        info = info.reward_model
    engine_class = info.load()
    for module in info.imports:
        importlib.import_module(module)

    def build(config: dict[str, Any], init_method: str) -> Any:
        return engine_class(
            EngineContext(
                config=RunConfig.model_validate(config),
                stack=stack,
                process=bootstrap.process,
                init_method=init_method,
            )
        )

    observer = RankObserver(stack.platform.runtime() if bootstrap.role == "trainer" else None)
    return Parts(build, observer, MemoryExplainer(stack.platform, bootstrap))


def _serve(connection: Connection, heartbeat: Heartbeat, holder: EngineHolder, parts: Parts) -> int:
    while True:
        frame = connection.recv_bytes()
        doing = BUILDING
        try:
            message = decode(frame)
            if isinstance(message, Call):
                doing = message.method
                reply = holder.answer(message, parts.observer)
            elif isinstance(message, Rebuild):
                holder.build(message.config, message.init_method)
                reply = encode(Result(None))
            else:
                holder.close()
                connection.send_bytes(encode(Result(None)))
                return 0
        except Exception as error:  # noqa: BLE001 - reported to the driver, which ends the run
            reply = encode(_failure(error, parts.memory, doing))
        heartbeat.answers += 1
        connection.send_bytes(reply)


def _move_output(early: int, log: Path) -> None:
    """Append to a log what this process has written into memory so far; all that follows goes there directly.

    Args:
        early: Descriptor of the memory. Output that a library has redirected elsewhere stays redirected.
        log: The log.
    """
    output, copied = open_to_append(log), 0
    try:
        for redirect in (True, False):  # other threads may write meanwhile
            text = os.pread(early, os.fstat(early).st_size - copied, copied)
            copied += len(text)
            while text:
                text = text[os.write(output, text) :]
            for stream in (1, 2) if redirect else ():
                if os.path.sameopenfile(stream, early):
                    os.dup2(output, stream)
        os.ftruncate(early, 0)
    finally:
        os.close(output)


def _failure(error: Exception, memory: MemoryExplainer | None, doing: str) -> Failure:
    text = traceback.format_exc()
    with contextlib.suppress(OSError):  # a full disk, mostly: the driver must hear of the error all the same
        sys.stderr.write(text)
    explained = None if memory is None else memory.explain(error, doing)
    return Failure.of(explained or error, text)


def _other_version(told: dict[str, Any]) -> Failure:
    """Make the error for a driver of another version: driver and worker exchange pickled classes of Anytron."""
    chosen = f", rollout.python = {told['python']}" if told["python"] else ""
    error = ConfigError(
        "The driver and a worker process have different versions of Anytron.",
        where=f"{told['role']} rank {told['rank']} on {socket.gethostname()}{chosen}",
        why=f"the driver has {told['version']}, and {sys.executable} has {__version__}",
        fix=f"run {sys.executable} -m pip install {installable(told['version'])}",
    )
    return Failure(str(error), error)


def _stay(number: int, frame: object) -> None:
    """Do nothing at a signal."""


def _watch(channel: int, heartbeat: Heartbeat) -> None:
    """Send heartbeats, report where this process stands, and when the driver is gone, kill it and all that it started.

    This runs in a thread, because the main thread may be in a collective that waits for a rank that has gone too.
    PR_SET_PDEATHSIG would not do: it fires when the *thread* that started this process ends.
    """
    poller = select.poll()
    poller.register(channel, select.POLLRDHUP)
    reporter = StandingReporter(heartbeat)
    while not poller.poll(BEAT_S * 1000):
        if heartbeat.begun:
            heartbeat.beat()
        reporter.beat()
    os.killpg(os.getpid(), signal.SIGKILL)  # workers are started as leaders of their own group
