"""A worker process: ``python -m anytron.executor.worker FD``, started by an executor.

The order is the point. Plain JSON comes first; from it follow the environment, the plugins, and the
patches that must be in place before an engine is imported; then the engine; and only then does this
process unpickle anything, because unpickling imports whatever the message names.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from anytron.executor.bootstrap import Bootstrap
from anytron.executor.channel import Call, Failure, Rebuild, Result, decode, encode, receive_json

if TYPE_CHECKING:
    from collections.abc import Callable

    EngineBuilder = Callable[[dict[str, Any]], Any]
    RangeMarker = Callable[[str], contextlib.AbstractContextManager[Any]]

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads to its log; sent to a rank that does not answer."""


def main(descriptor: int) -> int:
    """Bootstrap, build the engine, and answer calls until told to stop.

    Args:
        descriptor: This process's end of the socket pair.

    Returns:
        Exit status: 0 after an orderly stop.
    """
    os.set_inheritable(descriptor, False)  # a process started by the engine must not keep the channel open
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    connection = Connection(descriptor)
    bootstrap = Bootstrap(**receive_json(connection))
    threading.Thread(target=_end_with_driver, args=(descriptor,), name="anytron-driver-watch", daemon=True).start()
    try:
        build, marked = start(bootstrap)
        engine = build(bootstrap.config)
    except Exception as error:  # noqa: BLE001 - reported to the driver, which ends the run
        connection.send_bytes(encode(_failure(error)))
        return 1
    connection.send_bytes(encode(Result(None)))
    return _serve(connection, engine, build, marked)


def start(bootstrap: Bootstrap) -> tuple[EngineBuilder, RangeMarker]:
    """Do everything that must happen before the first unpickling, up to the import of the engine.

    Returns:
        What builds the engine of a configuration, given as JSON values; and what marks a call in the device's
        profiler, by the called method's name (training ranks only: other engines may leave the device alone).
    """
    os.environ.update(bootstrap.distributed_env())
    sys.path[:] = bootstrap.sys_path
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from anytron.config.schema import RunConfig
    from anytron.layer import open_layer

    layer = open_layer(
        bootstrap.platform, bootstrap.platform_options, role=bootstrap.role, engine=bootstrap.engine_name
    )

    import torch

    from anytron.components import engine_info
    from anytron.engines.protocol import EngineContext

    torch.set_num_threads(bootstrap.num_threads)
    engine_class = engine_info(bootstrap.engine_group, bootstrap.engine_name, "engine").load()

    def build(config: dict[str, Any]) -> Any:
        return engine_class(
            EngineContext(
                config=RunConfig.model_validate(config),
                hooks=layer.hooks,
                platform=layer.platform,
                ledger=layer.ledger,
                process=bootstrap.process,
            )
        )

    return build, layer.platform.runtime().profiler_range if bootstrap.role == "trainer" else contextlib.nullcontext


def _serve(connection: Connection, engine: Any, build: EngineBuilder, marked: RangeMarker) -> int:
    while True:
        frame = connection.recv_bytes()
        try:
            message = decode(frame)
            if isinstance(message, Call):
                with marked(message.method):
                    result = getattr(engine, message.method)(*message.args, **message.kwargs)
                reply = encode(Result(result))
            elif isinstance(message, Rebuild):
                _close(engine)
                engine = None
                gc.collect()  # modules refer to each other; the next engine wants their memory
                os.environ["MASTER_PORT"] = str(message.master_port)
                engine = build(message.config)
                reply = encode(Result(None))
            else:
                _close(engine)
                connection.send_bytes(encode(Result(None)))
                return 0
        except Exception as error:  # noqa: BLE001 - reported to the driver, which ends the run
            reply = encode(_failure(error))
        connection.send_bytes(reply)


def _close(engine: Any) -> None:
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def _failure(error: Exception) -> Failure:
    text = traceback.format_exc()
    sys.stderr.write(text)
    return Failure.of(error, text)


def _end_with_driver(descriptor: int) -> None:
    """End this process and all that it started when the driver's end of the channel is gone.

    A thread, because the main one may be in a collective that waits for a rank that has gone too.
    PR_SET_PDEATHSIG would not do: it fires when the *thread* that started this process ends.
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    os.killpg(os.getpid(), signal.SIGKILL)  # executors start workers as leaders of their own group


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: process groups that modules still refer to (mcore-bridge keeps one in a global) take
    # their gloo threads into the interpreter's end, which is std::terminate.
    os._exit(status)
