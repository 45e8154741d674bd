"""The base class of a hardware plugin: :class:`Platform`, what its probe answers and what it has decided."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Literal

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel

    from anytron.device.patches import Ledger
    from anytron.device.runtime import DeviceRuntime
    from anytron.sequences.layout import LayoutConstraints

API_VERSION = 1
"""Version of the contract between this core and its platforms: this class and the hooks."""


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


@dataclass(frozen=True)
class EngineFacts:
    """Engine settings that process-wide state depends on; see :meth:`Platform.prepare_engine`.

    Attributes:
        sizes: The parallel sizes.
        deterministic: The same run must give the same bits.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    deterministic: bool = False


@dataclass(frozen=True)
class PeakFlops:
    """What a device can compute at most; see :meth:`Platform.peak_flops`.

    Attributes:
        per_s: Floating-point operations in a second, in products of dense matrices; None = it is not known.
        source: Where the number comes from, or why there is none. No full stop.
    """

    per_s: float | None
    source: str


@dataclass(frozen=True)
class LayoutRequest:
    """The properties of a run from which a platform decides on layout constraints.

    Attributes:
        format: ``thd`` (packed) or ``bshd`` (padded rows).
        traits: The traits of the model.
        parallel: The parallel sizes.
    """

    format: Literal["thd", "bshd"]
    traits: ModelTraits
    parallel: ParallelSizes


class Platform(abc.ABC):
    """A hardware platform: a plugin of the entry-point group ``anytron.platforms``.

    The loader makes one instance and, if it is chosen as the active platform, registers it, so hook
    implementations are methods marked with ``anytron.hookimpl``. Importing the module and calling
    the constructor must work on any machine, without the device or its libraries.

    Attributes:
        name: What users write in ``platform.name`` and ``ANYTRON_PLATFORM``.
        api_version: Version of this contract that the platform was written for; a platform must say it.
        accelerator: True for devices that win over the processor when they are usable.
        options_model: A pydantic model of ``platform.options`` (``extra="forbid"``); None = no options.
        redirects_torch_cuda: Engine code that hard-codes ``torch.cuda`` is redirected to :meth:`runtime`.
        portable_modules: Model building blocks that need a vendor's library come from the engine's
            portable implementation, whose kernels the hooks supply.
        device_packages: Import packages that teach torch this device. They are hidden from processes
            of other platforms, as are all that torch would load by itself
            (:mod:`anytron.device.loading.session`): a platform that needs one must name it.
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
    api_version: ClassVar[int]
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
        """Receive the validated ``platform.options`` before any hook is called; in the driver again, with all edits.

        The options are what a platform keeps. What it decides for a run, the hook ``configure`` answers as an edit of
        them, with its reason; hooks of a run are given its configuration, and keep nothing of it for each other.
        """

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

    def layout_constraints(self, request: LayoutRequest) -> LayoutConstraints:
        """Say what the device asks of every sequence layout: alignment and bucket, in tokens.

        Asked on every training rank, when its engine is built; the answers of all ranks must be the same.
        """
        from anytron.sequences.layout import LayoutConstraints  # imports torch

        del request
        return LayoutConstraints()

    def peak_flops(self, dtype: str) -> PeakFlops:
        """Say what the current device can compute at most, for the metric ``throughput/mfu``.

        Asked on training ranks, when the engine has been built.

        Args:
            dtype: Element type of the matrices, ``model.dtype``.
        """
        del dtype
        return PeakFlops(None, f"platform {self.name} gives no number")

    def prepare_engine(self, facts: EngineFacts, ledger: Ledger) -> None:  # noqa: B027 - optional to override
        """Set this process's global state for the engine that is about to be built.

        Called for each training engine, before its process groups exist. Patches depend only on the process; global
        state that a vendor's library derives from an engine's settings is set here.

        Args:
            facts: The settings of the engine.
            ledger: The patches of this process; who replaces patched attributes calls ``revalidate``.
        """


class Feature(str, Enum):
    """What a platform may do or not; see ``Platform.limits``."""

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
    """Something that a platform does not do; see ``Platform.limits``.

    Attributes:
        feature: What.
        reason: Why not, for the user whose run asks for it. No full stop.
    """

    feature: Feature
    reason: str


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
                why=f"the answer lists {one!r}, which is not a Decision",
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
                why=f"the answer lists {one!r}, which is not a Limit of a Feature with a reason",
            )
        found[one.feature] = one.reason
    return found


def layout_constraints_of(platform: Platform, request: LayoutRequest) -> LayoutConstraints:
    """Ask a platform for its layout constraints.

    Raises:
        HookContractError: The answer is something else.
    """
    from anytron.sequences.layout import LayoutConstraints

    found: object = platform.layout_constraints(request)
    if not isinstance(found, LayoutConstraints):
        raise HookContractError(
            f"Platform '{platform.name}' breaks the contract of layout_constraints.",
            why=f"the answer is {found!r}, which is not LayoutConstraints",
        )
    return found


def declined(platform: Platform, asked: Iterable[Feature]) -> dict[Feature, str]:
    """Find the requested features that a platform declares not to have: half a sentence with the reason, by feature.

    Raises:
        HookContractError: As :func:`limits_of`.
    """
    limits = limits_of(platform)
    return {one: f"the platform {platform.name} has no {one.value}: {limits[one]}" for one in asked if one in limits}


def features_asked(traits: ModelTraits, sizes: ParallelSizes) -> list[Feature]:
    """Name what a model asks of a platform by its traits, and by how it is split."""
    asked = {
        Feature.VISION: traits.vision,
        Feature.LATENT_ATTENTION: traits.latent_attention,
        Feature.LINEAR_ATTENTION: traits.linear_attention,
        Feature.MIXTURE_OF_EXPERTS: traits.mixture_of_experts,
        Feature.SLIDING_WINDOW: traits.window is not None,
        Feature.TENSOR_PARALLEL: sizes.tensor > 1,
        Feature.PIPELINE_PARALLEL: sizes.pipeline > 1,
        Feature.CONTEXT_PARALLEL: sizes.context > 1,
        Feature.EXPERT_PARALLEL: sizes.expert > 1,
        Feature.INTERLEAVED_PIPELINE: sizes.virtual_pipeline > 1,
    }
    return [feature for feature, present in asked.items() if present]
