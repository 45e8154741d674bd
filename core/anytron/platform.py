"""The base classes of a hardware plugin: :class:`Platform`, and :class:`DeviceRuntime`, the device itself."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from anytron.errors import HookContractError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from pydantic import BaseModel

    from anytron.config.schema import RunConfig
    from anytron.patches import Ledger


class Availability(str, Enum):
    """The result of a probe."""

    USABLE = "usable"
    ABSENT = "absent"
    """There is no such device on this machine; another platform may be chosen."""
    BROKEN = "broken"
    """The device or its software is there but cannot be used; this is never ignored."""


@dataclass(frozen=True)
class Probe:
    """The answer of :meth:`Platform.probe`.

    Attributes:
        availability: Usable, absent or broken.
        reason: What was found, one sentence.
        remedy: How a person can fix it; empty if usable.
        devices: Number of usable devices.
    """

    availability: Availability
    reason: str
    remedy: str = ""
    devices: int = 0


@dataclass(frozen=True)
class Decision:
    """Something that a platform has chosen by itself, with the reason; see :meth:`Platform.decisions`.

    Attributes:
        name: What there was to choose, in a word or two, for example ``modules``.
        value: What was chosen.
        reason: Why, and if something better was passed over, why that. No full stop.
    """

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.reason})"


class Feature(str, Enum):
    """What a platform may do or not; see :meth:`Platform.limits`."""

    OWN_DEVICE = "own-device"
    """Memory and arithmetic apart from the processor's, which plays the device of a platform for development."""
    THD = "thd"
    """Packed sequences."""
    BSHD = "bshd"
    """Padded rows."""
    BFLOAT16 = "bfloat16"
    TENSOR_PARALLEL = "tensor-parallel"
    PIPELINE_PARALLEL = "pipeline-parallel"
    CONTEXT_PARALLEL = "context-parallel"
    EXPERT_PARALLEL = "expert-parallel"
    INTERLEAVED_PIPELINE = "interleaved-pipeline"
    """Several pieces of the model on each pipeline rank."""
    RECOMPUTE = "recompute"
    """Forward passes that are computed again in the backward pass."""
    LATENT_ATTENTION = "latent-attention"
    """Multi-latent attention (MLA)."""
    LINEAR_ATTENTION = "linear-attention"
    """Gated DeltaNet."""
    MIXTURE_OF_EXPERTS = "mixture-of-experts"
    ROUTER_REPLAY = "router-replay"
    """Routers that send tokens to experts that they are told."""
    MULTI_TOKEN_PREDICTION = "multi-token-prediction"  # noqa: S105 - no password
    """Modules that predict tokens further ahead (MTP), trained beside the policy."""
    ADAPTERS = "adapters"
    """Low-rank adapters (LoRA)."""
    CRITIC = "critic"
    """A second model with a value head."""
    VISION = "vision"
    SLIDING_WINDOW = "sliding-window"
    ATTENTION_SINKS = "attention-sinks"


@dataclass(frozen=True)
class Limit:
    """Something that a platform does not do; see :meth:`Platform.limits`.

    Attributes:
        feature: What.
        reason: Why not, for the user whose run asks for it. No full stop.
    """

    feature: Feature
    reason: str


@dataclass(frozen=True)
class MemoryStats:
    """Device memory of this process, in bytes.

    Attributes:
        allocated: Memory of tensors now.
        peak_allocated: The most of it since the start, or since ``reset_peak_memory_stats``.
        reserved: Memory that the allocator holds, cached blocks included.
        total: The device's size.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    total: int


class DeviceRuntime(abc.ABC):
    """The device as the engines use it; no other code names it. There is one per process.

    Engines whose code hard-codes ``torch.cuda`` are redirected to this object on platforms whose
    ``redirects_torch_cuda`` is True.
    """

    device_type: ClassVar[str]
    """``torch.device`` type, for example ``cpu``."""
    communication_backend: ClassVar[str]
    """Name of the ``torch.distributed`` backend for tensors of this device."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """How many devices this process can use."""

    @abc.abstractmethod
    def current_device(self) -> torch.device:
        """The device on which new tensors of this process belong, with its index if it has one."""

    @abc.abstractmethod
    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on the current device is done."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Return cached, unused memory to the device."""

    @abc.abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Memory of the current device."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's random number generator."""

    @abc.abstractmethod
    def get_rng_state(self) -> torch.Tensor:
        """uint8 state of the device's generator, on the host."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""

    @abc.abstractmethod
    def default_generator(self) -> torch.Generator:
        """The generator that device operations draw from."""

    def device_name(self) -> str:
        """Name of the current device, for people."""
        return self.device_type

    def compute_capability(self) -> tuple[int, int]:
        """(major, minor), for engine code that asks it; (0, 0) where the notion does not exist."""
        return (0, 0)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Whether matrix products and collectives run in ``dtype``."""
        del dtype
        return True

    def can_pin_memory(self) -> bool:
        """Whether host memory can be pinned for this device."""
        return False

    def reset_peak_memory_stats(self) -> None:  # noqa: B027 - optional to override
        """Reset ``memory_stats().peak_allocated``; does nothing where the device cannot."""

    def new_stream(self) -> Any:
        """A new stream; None where the device runs everything in order.

        Streams have the interface of ``torch.Stream``: ``wait_stream``, ``wait_event``,
        ``record_event``, ``query``, ``synchronize``, and a ``with`` block that makes one current.
        """
        return None

    def current_stream(self) -> Any:
        """The stream in use; None exactly where :meth:`new_stream` gives None."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device has no memory left.

        A torch whose allocator is torch's own raises ``torch.OutOfMemoryError``, on every device. Libraries that
        allocate by themselves raise what they like.
        """
        import torch

        return isinstance(error, torch.OutOfMemoryError)

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range in the device's own profiler; every call of a training engine is one, by its name."""
        del name
        return nullcontext()


class TorchDeviceRuntime(DeviceRuntime):
    """A device whose module in torch has the interface of ``torch.cuda``: ``torch.<device_type>``.

    Plugins import what adds that module to torch before they make one.
    """

    def __init__(self) -> None:
        import torch

        self.module: Any = torch.get_device_module(self.device_type)

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self.module.device_count())

    def current_device(self) -> torch.device:
        """``<device_type>:<index>``."""
        import torch

        return torch.device(self.device_type, self.module.current_device())

    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""
        self.module.set_device(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        self.module.empty_cache()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's view of the current device."""
        return MemoryStats(
            allocated=self.module.memory_allocated(),
            peak_allocated=self.module.max_memory_allocated(),
            reserved=self.module.memory_reserved(),
            total=self.module.get_device_properties(self.module.current_device()).total_memory,
        )

    def reset_peak_memory_stats(self) -> None:
        """Let the allocator's peak begin anew."""
        self.module.reset_peak_memory_stats()

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.module.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """uint8 state of the current device's generator."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""
        self.module.set_rng_state(state)

    def default_generator(self) -> torch.Generator:
        """The current device's generator; the device is initialised first, which creates the generators."""
        self.module.init()
        generator: torch.Generator = self.module.default_generators[self.module.current_device()]
        return generator

    def device_name(self) -> str:
        """The current device's name, as its driver gives it."""
        return str(self.module.get_device_name(self.module.current_device()))

    def can_pin_memory(self) -> bool:
        """Return True: copies from pinned memory overlap with computation."""
        return True

    def new_stream(self) -> Any:
        """A new stream of the current device."""
        return self.module.Stream()

    def current_stream(self) -> Any:
        """The stream in use on the current device, which is initialised."""
        return self.module.current_stream()


class Platform(abc.ABC):
    """A hardware platform: a plugin of the entry-point group ``anytron.platforms``.

    The loader makes one instance and, if it is chosen as the active platform, registers it, so hook
    implementations are methods marked with ``anytron.hookimpl``. Importing the module and calling
    the constructor must work on any machine, without the device or its libraries.

    Attributes:
        name: What users write in ``platform.name`` and ``ANYTRON_PLATFORM``.
        api_version: Version of this contract that the plugin was written for.
        accelerator: True for devices that win over the processor when they are usable.
        options_model: A pydantic model of ``platform.options`` (``extra="forbid"``); None = no options.
        redirects_torch_cuda: Engine code that hard-codes ``torch.cuda`` is redirected to :meth:`runtime`.
        portable_modules: Model building blocks that need a vendor's library come from the engine's
            portable implementation, whose kernels the hooks supply.
        device_packages: Import packages that teach torch this device. They are hidden from processes
            of other platforms, as are all that torch would load by itself
            (:mod:`anytron.plugins.foreign_devices`): a platform that needs one must name it.
        visible_devices_variable: Environment variable that restricts which devices a process sees, by their
            ids with commas between; None = there is none.
        socket_interface_variables: Environment variables that name the network interface on which the device's
            collectives listen. Where all ranks are on one machine, they name the loopback interface.
        environment_prefixes: Beginnings of the names of variables that the device's libraries read. They go to workers
            on other machines.
        ray_resource: Resource by which Ray counts the devices (executor ``ray``); None = it counts processors.
        engine: Name of this process's engine, in the driver of the training engine; set before
            :meth:`configure_options`. None where there is no run.
    """

    name: ClassVar[str]
    api_version: ClassVar[int] = 1
    accelerator: ClassVar[bool] = True
    options_model: ClassVar[type[BaseModel] | None] = None
    redirects_torch_cuda: bool = True
    portable_modules: bool = True
    device_packages: ClassVar[tuple[str, ...]] = ()
    visible_devices_variable: ClassVar[str | None] = None
    socket_interface_variables: ClassVar[tuple[str, ...]] = ()
    environment_prefixes: ClassVar[tuple[str, ...]] = ()
    ray_resource: ClassVar[str | None] = None
    engine: str | None = None

    @abc.abstractmethod
    def probe(self) -> Probe:
        """Say whether the device can be used, without initialising it and without raising."""

    @abc.abstractmethod
    def runtime(self) -> DeviceRuntime:
        """Load the device's libraries and return the runtime; the same object at each call."""

    def configure_options(self, options: BaseModel | None) -> None:  # noqa: B027 - optional to override
        """Receive the validated ``platform.options`` before any hook is called."""

    def decisions(self) -> Iterable[Decision]:
        """Say what the platform has chosen by itself, such as whose modules a model is built from.

        The first lines of a run and ``anytron doctor`` show the answer of the driver, which may take seconds and must
        not initialise the device; ``patches.json`` has that of each training rank, asked when its engine is built. A
        decision called ``modules`` explains :attr:`portable_modules`.
        """
        return ()

    def limits(self) -> Iterable[Limit]:
        """Say what the platform does not do, whatever the configuration.

        A run that asks for it is refused with the reason, and the conformance kit counts what it does not check
        for it. What depends on other keys of the configuration, the hook ``configure`` refuses.
        """
        return ()

    def prepare_engine(self, config: RunConfig, ledger: Ledger) -> None:  # noqa: B027 - optional to override
        """Set this process's global state for the engine that is about to be built.

        Training engines call it for each engine, before its process groups exist. Patches depend only on the
        process; global state that a vendor's library derives from the configuration is set here.

        Args:
            config: The engine's run.
            ledger: The patches of this process; who replaces patched attributes calls ``revalidate``.
        """


def decisions_of(platform: Platform) -> tuple[Decision, ...]:
    """Ask a platform for its decisions.

    Raises:
        HookContractError: The answer holds something else, or one name twice.
    """
    found = tuple(platform.decisions())
    for one in found:
        if not isinstance(one, Decision):
            raise HookContractError(
                f"Platform '{platform.name}' breaks the contract of decisions.",
                why=f"the answer lists {one!r}, which is no Decision",
            )
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise HookContractError(
            f"Platform '{platform.name}' breaks the contract of decisions.",
            why=f"something is decided twice: {', '.join(names)}",
        )
    return found


def limits_of(platform: Platform) -> dict[Feature, str]:
    """Ask a platform for its limits: the reason by feature.

    Raises:
        HookContractError: The answer holds something else, or a limit without a reason.
    """
    found: dict[Feature, str] = {}
    for one in platform.limits():
        if not isinstance(one, Limit) or not isinstance(one.feature, Feature) or not one.reason:
            raise HookContractError(
                f"Platform '{platform.name}' breaks the contract of limits.",
                why=f"the answer lists {one!r}, which is no Limit of a Feature with a reason",
            )
        found[one.feature] = one.reason
    return found
