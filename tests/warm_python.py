"""Python programs of the tests, forked from a process that has already imported what is slow to import.

A rank takes eight seconds of processor time to import torch, torch's compiler and transformers, and most
tests need it for less than one. :class:`WarmPopen` is :class:`subprocess.Popen` for commands that begin with this
interpreter: it asks a server to fork, and the child runs the command's program with its arguments, environment,
directory and descriptors, in a session of its own if asked. What such a program starts is forked in the same way.

In the server of ranks, nothing of Anytron, Megatron or mcore-bridge is imported beforehand: which patch meets which
module in what order is what it is after a start from nothing. Processes share the seed of their hashes, though, and
have no resource limits of their own; tests that are about starting, ending and limits start their processes from
nothing.

The processes of rewards and environments need neither torch nor patches, and a fork of all that was imported for ranks
costs 0.2 s: a second, small server has imported them, and its forks cost a tenth of that.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

PRELOADED = (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "einops",
    "pydantic.fields",
    "pydantic.functional_validators",
    "pydantic.main",
    "pydantic.types",
    "setuptools",
    "torch.utils.tensorboard",
)
WORKERS = ("anytron.task.rewards.worker", "anytron.task.environments.worker")
"""Modules whose ``main`` isolated processes run: ``python -c PROGRAM MODULE ...``."""
PRELOADED_FOR_WORKERS = (*WORKERS, "anytron.task.rewards.registered")
READ_BY_THE_INTERPRETER = ("PYTHONHASHSEED", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONSAFEPATH")
"""Variables that mean something only when an interpreter starts: a fork must want them as its server has them."""
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Read once, when OpenMP is loaded: its threads sleep while they have nothing to do. Two tests at a time have more of
them than a small machine has processors, and spinning threads made each five times as long."""
IMPORTED_FROM = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
"""Where the servers find modules, whatever the test sets that is the first to need them."""
FIRST_KEPT = 500
"""Descriptors of the server's own are moved here or beyond, where no caller's is."""


StartedCold = subprocess.Popen


class WarmPopen(StartedCold):
    """A process that a server forks, if the command is one that it can run; an ordinary one otherwise."""

    requests: ClassVar[list[socket.socket]] = []
    """What is sent here, the server of programs and that of workers receive; empty until somebody needs one."""
    servers: ClassVar[list[subprocess.Popen]] = []
    session: ClassVar[int]
    """The servers' session: a child can be in this one or in one of its own."""
    _status: socket.socket | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        _startupinfo, _creationflags, shell, *pipes = rest[:9]
        new_session = rest[14]
        command = [os.fspath(part) for part in ([args] if isinstance(args, (str, bytes)) else args)]
        variables = dict(os.environ if env is None else env)
        if (
            not can_run(command)
            or executable not in (None, command[0])
            or preexec_fn is not None
            or shell
            or any(variables.get(name) != os.environ.get(name) for name in READ_BY_THE_INTERPRETER)
            or (server_session() != os.getsid(0) and not new_session)
        ):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        standard = enumerate((pipes[0], pipes[3], pipes[5]))
        given = {number: number if ours == -1 else ours for number, ours in standard}
        given |= {number: number for number in pass_fds}
        request = {
            "arguments": command[1:],
            "variables": variables,
            "directory": os.fspath(cwd or Path.cwd()),
            "group": None if new_session else os.getpgid(0),
            "descriptors": list(given),
        }
        self._status, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            server = self.requests[is_worker(command, variables)]
            socket.send_fds(server, [json.dumps(request).encode()], [theirs.fileno(), *given.values()])
        self._child_created = True
        self._close_pipe_fds(*pipes)
        self.pid = self._read()

    def _read(self) -> int:
        line = self._status.recv(16)
        if not line:
            raise RuntimeError("the server of warm Python processes has ended")
        return int(line)

    def _internal_poll(self, _deadstate=None, **_unused):
        if self._status is None:
            return super()._internal_poll(_deadstate)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode

    def _wait(self, timeout):
        if self._status is None:
            return super()._wait(timeout)
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._read()
            self._status.close()
        return self.returncode


def can_run(command: list[str]) -> bool:
    """Whether a command is this interpreter with a program and no options but those that a fork can have."""
    if command[0] != sys.executable:
        return False
    options = command[3:] if command[1:3] == ["-W", "ignore"] else command[1:]
    return bool(options) and (options[0] in ("-c", "-m") or not options[0].startswith("-"))


def is_worker(command: list[str], variables: dict[str, str]) -> bool:
    """Whether a command that can run is a process of a reward or an environment, with the servers' modules."""
    worker = command[1] == "-c" and len(command) > 3 and command[3] in WORKERS
    return worker and variables.get("PYTHONPATH") == IMPORTED_FROM.get("PYTHONPATH")


def server_session() -> int:
    """Start the servers if there are none yet; return their session. They end with this process."""
    if not WarmPopen.requests:
        pairs = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in (PRELOADED, PRELOADED_FOR_WORKERS)]
        WarmPopen.requests = [ours for ours, _ in pairs]
        asking = [ours.fileno() for ours in WarmPopen.requests]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables = {**inherited, **IMPORTED_FROM, **QUIET_THREADS}
        for (_, theirs), modules in zip(pairs, (PRELOADED, PRELOADED_FOR_WORKERS), strict=True):
            numbers = theirs.fileno(), *asking
            command = [sys.executable, __file__, ",".join(modules), *map(str, numbers)]
            with theirs:
                server = StartedCold(command, pass_fds=numbers, stdin=subprocess.DEVNULL, env=variables)
            WarmPopen.servers.append(server)
        WarmPopen.session = os.getsid(0)
    return WarmPopen.session


def end_server() -> None:
    """End the servers of this process, if it has any; the next command starts others."""
    while WarmPopen.servers:
        WarmPopen.requests.pop().close()
        server = WarmPopen.servers.pop()
        server.kill()
        server.wait()


def serve(requests: socket.socket, modules: list[str]) -> None:
    """Import modules; fork what is asked for, and report each child's number and then its status.

    It ends with the process that started it.
    """
    starter = os.pidfd_open(os.getppid())
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):  # older Megatrons are tested without some of them
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([starter, requests, *running], [], [])[0]:
            if ready == starter:
                return
            if ready is requests:
                message, (reply, *descriptors), *_ = socket.recv_fds(requests, 1 << 20, 64)
                grouped, own = os.pipe()
                child = os.fork()
                if not child:
                    become(json.loads(message), descriptors)
                os.close(own)
                # Returns once the child, in its group, has closed its copy: who learns its number may signal its group.
                os.read(grouped, 1)
                os.close(grouped)
                status = socket.socket(fileno=reply)
                with contextlib.suppress(ConnectionError):  # who asked has been killed
                    status.send(b"%d" % child)
                running[os.pidfd_open(child)] = child, status
                for descriptor in descriptors:
                    os.close(descriptor)
            else:
                os.close(ready)
                child, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with contextlib.suppress(ConnectionError), status:
                    status.send(b"%d" % code)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the program of a request in this process, a child of the server, and end it."""
    if request["group"] is None:
        os.setsid()
    else:
        os.setpgid(0, request["group"])
    asking = [server.detach() for server in WarmPopen.requests]
    first = max(FIRST_KEPT, *request["descriptors"]) + 1
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, first) for number in [*asking, *descriptors]]
    os.closerange(3, first)
    WarmPopen.requests = [socket.socket(fileno=number) for number in kept[: len(asking)]]
    for number, wanted in zip(kept[len(asking) :], request["descriptors"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    subprocess.Popen = WarmPopen
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["directory"])
    os._exit(run_program(request["arguments"]))


def run_program(arguments: list[str]) -> int:
    """Do what the interpreter does with the arguments of its command line; return the exit status."""
    if arguments[0] == "-W" or os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
        arguments = arguments[2:] if arguments[0] == "-W" else arguments
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*folders, *sys.path[1:]]  # the first is the folder of this file
    importlib.invalidate_caches()
    time.tzset()
    tempfile.tempdir = None  # TMPDIR may be another one
    option, *rest = arguments
    try:
        if option == "-c":
            sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif option == "-m":
            sys.argv, sys.path[:0] = rest, [str(Path.cwd())]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = arguments, [str(Path(option).parent)]
            runpy.run_path(option, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it is, it ends the program
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked, *asking = map(int, sys.argv[2:])
    WarmPopen.requests = [socket.socket(fileno=number) for number in asking]
    WarmPopen.session = os.getsid(0)
    serve(socket.socket(fileno=asked), sys.argv[1].split(","))
