"""Messages between the driver and one worker, over a socket pair that no other process can reach.

The first two messages to a worker are plain JSON: before it imports anything else, and before it builds its engine. All
later messages, and all answers, are pickles. Importing this module imports neither torch nor an engine: a worker reads
its bootstrap through it.
"""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import anytron.base.errors
from anytron.base.errors import AnytronError
from anytron.base.files import exhausted
from anytron.base.version import __version__
from anytron.device.hooks.types import ProcessInfo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

    from anytron.device.hooks.types import Role

Message = bytes
"""A serialised message; made once and sent to as many workers as need it."""
Model = Literal["policy", "reward_model"]
"""The model that a process belongs to: the policy (with the models in the same processes, such as the reference), or a
reward model."""


@dataclass(frozen=True)
class Call:
    """Driver to worker: call a method of the engine."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Rebuild:
    """Driver to worker: close the engine and build one for another configuration.

    Attributes:
        config: The configuration as JSON values.
        init_method: New rendezvous of the group's ranks.
    """

    config: dict[str, Any]
    init_method: str


@dataclass(frozen=True)
class Stop:
    """Driver to worker: close the engine and exit."""


@dataclass(frozen=True)
class Result:
    """Worker to driver: what the call returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """Worker to driver: the exception that was raised, as text, and as an :class:`AnytronError` if it is one.

    ``error`` is converted to its nearest base class in :mod:`anytron.base.errors`, because unpickling a class
    that an engine defines would import the engine into the driver.
    """

    traceback: str
    error: AnytronError | None

    @classmethod
    def of(cls, raised: BaseException, traceback: str) -> Failure:
        """Make a message from an exception; unpickling the message imports nothing in the driver."""
        known = raised if isinstance(raised, AnytronError) else exhausted(raised)
        if known is None:
            return cls(traceback, None)
        core = next(kind for kind in type(known).__mro__ if kind.__module__ == anytron.base.errors.__name__)
        error = cast("type[AnytronError]", core)(known.what, where=known.where, why=known.why, fix=known.fix)
        return cls(traceback, error)


def encode_json(value: dict[str, Any]) -> Message:
    """Serialise plain data."""
    return json.dumps(value).encode()


def receive_json(connection: Connection) -> dict[str, Any]:
    """Receive plain data; raise EOFError if the other side is gone."""
    return cast("dict[str, Any]", json.loads(connection.recv_bytes()))


def encode(message: Call | Rebuild | Stop | Result | Failure) -> Message:
    """Pickle a message. Host tensors are sent as raw bytes, by value: views of one storage become separate tensors."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    torch = sys.modules.get("torch")  # if it is not imported, the message has no tensor
    if torch is not None:
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
    pickler.dump(message)
    return buffer.getvalue()


def decode(message: Message) -> Any:
    """Unpickle a message."""
    return pickle.loads(message)  # noqa: S301 - the other end is our own process


def _reduced(value: Any) -> Any:
    """Reduce a plain host tensor to its bytes: ``torch.save``, which other tensors need, takes 0.1 ms for each."""
    import torch

    special = value.requires_grad or value.is_quantized or value.is_complex() or value.is_neg()
    if value.device.type != "cpu" or value.layout is not torch.strided or special or value.numel() == 0:
        return value.__reduce_ex__(5)
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    return _rebuild, (pickle.PickleBuffer(flat.numpy()), value.dtype, tuple(value.shape))


def _rebuild(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(data, dtype=dtype).reshape(shape)


@dataclass(frozen=True)
class Build:
    """The second message to a worker: build the engine.

    Attributes:
        init_method: Rendezvous of the group's ranks, for ``torch.distributed``.
        log: File to which all output of the process is appended, including its output so far; None = the output goes
            to a log already.
    """

    init_method: str
    log: str | None


@dataclass(frozen=True)
class Bootstrap:
    """The first message to a worker.

    Attributes:
        role: Role of the process.
        rank: Rank among the ``world_size`` processes of its group.
        local_rank: Rank among the group's processes on this machine.
        world_size: Number of processes in the group.
        local_world_size: Number of the group's processes on this machine.
        replica: Number of its group among the groups of its role that share the work.
        num_threads: Number of CPU threads that the process may use.
        platform: Name of the platform that the driver chose; the worker does not choose again.
        config: The run's configuration, resolved, as JSON values.
        engine_group: Entry-point group of the engine.
        engine_name: Name of the engine in that group.
        sys_path: The driver's ``sys.path``: what the driver can import, its workers can.
        python: Interpreter of a separate Python environment, whose ``sys.path`` the worker keeps; None = the driver's.
        model: The model that the rank belongs to.
        version: The driver's version of Anytron.
    """

    role: Role
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    replica: int
    num_threads: int
    platform: str
    config: dict[str, Any]
    engine_group: str
    engine_name: str
    sys_path: list[str]
    python: str | None = None
    model: Model = "policy"
    version: str = __version__

    @property
    def name(self) -> str:
        """Display name: role, replica if it is not the first, and rank."""
        replica = f" replica {self.replica}" if self.replica else ""
        return f"{self._kind.replace('_', ' ')}{replica} rank {self.rank}"

    @property
    def log(self) -> str:
        """Name of the log file of the process."""
        replica = f"-{self.replica}" if self.replica else ""
        return f"{self._kind}{replica}-{self.rank}.log"

    @property
    def process(self) -> ProcessInfo:
        """Description of the process for plugins."""
        return ProcessInfo(self.role, self.rank, self.local_rank, self.world_size)

    @property
    def _kind(self) -> str:
        return self.role if self.model == "policy" else self.model

    def distributed_env(self) -> dict[str, str]:
        """The variables with which launchers such as torchrun tell a process its rank."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }
