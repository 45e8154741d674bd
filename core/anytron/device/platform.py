"""The base class of a hardware plugin: :class:`Platform`, and the types of its answers."""

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
    """This machine does not have the device; another platform may be chosen."""
    BROKEN = "broken"
    """The device or its software is there but cannot be used; this is never ignored."""


@dataclass(frozen=True)
class Probe:
    """The answer of :meth:`Platform.probe`.

    Attributes:
        availability: Usable, absent or broken.
        reason: Why the device is usable, absent or broken, in one sentence.
        remedy: How to fix the problem; empty if usable.
        devices: Number of usable devices.
    """

    availability: Availability
    reason: str
    remedy: str = ""
    devices: int = 0


@dataclass(frozen=True)
class Decision:
    """A choice that a platform has made by itself, with the reason; see :meth:`Platform.decisions`.

    Attributes:
        name: Subject of the choice, in a word or two, for example ``modules``.
        value: The option that was chosen.
        reason: Reason for the choice, and why a better option was not used, if there is one. No full stop.
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
        deterministic: Whether the same run must produce the same bits.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    deterministic: bool = False


@dataclass(frozen=True)
class PeakFlops:
    """Peak arithmetic throughput of a device; see :meth:`Platform.peak_flops`.

    Attributes:
        per_s: Floating-point operations per second, in products of dense matrices; None = unknown.
        source: Source of the number, or why it is unknown. No full stop.
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
        api_version: Version of the plugin contract that the platform was written for; required.
        accelerator: True for devices that are chosen before the CPU when they are usable.
        options_model: A pydantic model of ``platform.options`` (``extra="forbid"``); None = no options.
        redirects_torch_cuda: True: engine code that hard-codes ``torch.cuda`` is redirected to :meth:`runtime`.
        portable_modules: True: instead of a vendor's modules, models are built from the engine's portable modules,
            whose kernels the hooks supply.
        chosen_by_name_only: True: the platform is used only if the user names it. Its probe is called if the user names
            it, or if the user names no platform and no other accelerator is found. If the user has not named it and its
            probe finds a usable device, the start is refused: neither this platform nor the CPU is chosen.
        named: For platforms with ``chosen_by_name_only``: whether the user has named it. Set before :meth:`probe`.
        covered_packages: For platforms with ``chosen_by_name_only``: the ``device_packages`` of all loaded platforms
            that do not set it. Unless the user named this platform, its probe can skip these packages, because the
            probes of the other platforms report on them. Set before :meth:`probe`.
        device_packages: Import packages that add this device to torch. They are hidden from processes
            of other platforms, as are all packages that torch would load by itself
            (:mod:`anytron.device.loading.hiding`): a platform that needs such a package must list it here. The
            platform's own probe can import the listed packages.
        visible_devices_variable: Environment variable that restricts which devices a process sees, by
            comma-separated ids; None = the device has no such variable.
        socket_interface_variables: Environment variables that name the network interface on which the device's
            collectives listen. Where all ranks are on one machine, they name the loopback interface; with Ray on
            several machines, the one that has the machine's address in the cluster.
        environment_prefixes: Prefixes of the environment variables that the device's libraries read. Workers on other
            machines receive these variables.
        ray_resource: Resource by which Ray counts the devices (executor ``ray``); None = Ray counts CPUs.
        engine: Name of the engine of this process; in the driver, of the training engine. It is set before
            :meth:`configure_options`; None outside of a run.
    """

    name: ClassVar[str]
    api_version: ClassVar[int]
    accelerator: ClassVar[bool] = True
    chosen_by_name_only: ClassVar[bool] = False
    options_model: ClassVar[type[BaseModel] | None] = None
    redirects_torch_cuda: bool = True
    portable_modules: bool = True
    device_packages: tuple[str, ...] = ()
    visible_devices_variable: ClassVar[str | None] = None
    socket_interface_variables: ClassVar[tuple[str, ...]] = ()
    environment_prefixes: ClassVar[tuple[str, ...]] = ()
    ray_resource: ClassVar[str | None] = None
    named: bool = False
    covered_packages: frozenset[str] = frozenset()
    engine: str | None = None

    @abc.abstractmethod
    def probe(self) -> Probe:
        """Return whether the device can be used, without initialising it and without raising."""

    @abc.abstractmethod
    def runtime(self) -> DeviceRuntime:
        """Load the device's libraries and return the runtime; the same object at each call."""

    def configure_options(self, options: BaseModel | None) -> None:  # noqa: B027 - optional to override
        """Receive the validated ``platform.options`` before any hook is called; in the driver again after all edits.

        An override stores the options and nothing else. To decide something for a run, return an edit of the options,
        with its reason, from the hook ``configure``. Hooks receive a run's configuration and must not store it.
        """

    def decisions(self) -> Iterable[Decision]:
        """Return the choices that the platform has made by itself, such as whose modules a model is built from.

        The first lines of a run and ``anytron doctor`` show the driver's answer; the call may take seconds and must
        not initialise the device. ``patches.json`` has the answer that each training rank gave when its engine was
        built. A decision called ``modules`` explains :attr:`portable_modules`.
        """
        return ()

    def limits(self) -> Iterable[Limit]:
        """Return the features that the platform lacks, whatever the configuration.

        A run that needs such a feature is refused with the reason; the conformance kit skips and counts the checks that
        need the feature. Limits that depend on other keys of the configuration belong in the hook ``configure``.
        """
        return ()

    def layout_constraints(self, request: LayoutRequest) -> LayoutConstraints:
        """Return what the device requires of every sequence layout: alignment and bucket, in tokens.

        Called on every training rank, when its engine is built; all ranks must return the same answer.
        """
        from anytron.sequences.layout import LayoutConstraints  # imports torch

        del request
        return LayoutConstraints()

    def peak_flops(self, dtype: str) -> PeakFlops:
        """Return the peak throughput of the current device, for the metric ``throughput/mfu``.

        Called on training ranks, when the engine has been built.

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
            ledger: The patches of this process. Code here that replaces patched attributes must call
                ``ledger.revalidate()`` afterwards.
        """


class Feature(str, Enum):
    """A feature that a platform may lack; see ``Platform.limits``."""

    OWN_DEVICE = "own-device"
    """Memory and arithmetic separate from the CPU's. A platform for development uses the CPU as its device."""
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
    """Gated DeltaNet and Mamba-2."""
    MIXTURE_OF_EXPERTS = "mixture-of-experts"
    ROUTER_REPLAY = "router-replay"
    """Routers that send tokens to prescribed experts."""
    MULTI_TOKEN_PREDICTION = "multi-token-prediction"  # noqa: S105 - no password
    """Modules that predict tokens further ahead (MTP), trained beside the policy."""
    ADAPTERS = "adapters"
    """Low-rank adapters (LoRA)."""
    CRITIC = "critic"
    """A second model with a value head."""
    VISION = "vision"
    SLIDING_WINDOW = "sliding-window"
    ATTENTION_SINKS = "attention-sinks"
    COMPANY_INVARIANCE = "company-invariance"
    """Kernels that give a row the same bits whatever else is in the call (``engine.on_policy=bitwise``)."""


@dataclass(frozen=True)
class Limit:
    """A feature that a platform lacks; see ``Platform.limits``.

    Attributes:
        feature: The feature.
        reason: Why the platform lacks it, for the user whose run needs it. No full stop.
    """

    feature: Feature
    reason: str


def decisions_of(platform: Platform) -> tuple[Decision, ...]:
    """Ask a platform for its decisions.

    Raises:
        HookContractError: The answer contains an object that is not a Decision, or one name twice.
    """
    found = tuple(platform.decisions())
    for one in found:
        if not isinstance(one, Decision):
            raise HookContractError(
                f"Platform '{platform.name}' returned an invalid entry from decisions().",
                where=f"platform {platform.name}",
                why=f"{one!r} is not a Decision",
                fix="let decisions() return only objects of anytron.Decision",
            )
    names = [one.name for one in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise HookContractError(
            f"Platform '{platform.name}' returned several decisions with the same name from decisions().",
            where=f"platform {platform.name}",
            why=f"more than one has the name {', '.join(repeated)}",
            fix="give each decision a different name",
        )
    return found


def limits_of(platform: Platform) -> dict[Feature, str]:
    """Ask a platform which features it lacks; return the reason for each of these features.

    Raises:
        HookContractError: The answer contains an object that is not a Limit, or a limit without a reason.
    """
    found: dict[Feature, str] = {}
    for one in platform.limits():
        if not isinstance(one, Limit) or not isinstance(one.feature, Feature) or not one.reason:
            raise HookContractError(
                f"Platform '{platform.name}' returned an invalid entry from limits().",
                where=f"platform {platform.name}",
                why=f"{one!r} is not a Limit that has a Feature and a reason",
                fix="let limits() return only objects of anytron.Limit, each with a feature and a reason",
            )
        found[one.feature] = one.reason
    return found


def layout_constraints_of(platform: Platform, request: LayoutRequest) -> LayoutConstraints:
    """Ask a platform for its layout constraints.

    Raises:
        HookContractError: The answer is not LayoutConstraints.
    """
    from anytron.sequences.layout import LayoutConstraints

    found: object = platform.layout_constraints(request)
    if not isinstance(found, LayoutConstraints):
        raise HookContractError(
            f"Platform '{platform.name}' returned an invalid value from layout_constraints().",
            where=f"platform {platform.name}",
            why=f"{found!r} is not a LayoutConstraints",
            fix="let layout_constraints() return an object of anytron.sequences.LayoutConstraints",
        )
    return found


def declined(platform: Platform, asked: Iterable[Feature]) -> dict[Feature, str]:
    """Return, for each requested feature that the platform lacks, a clause that says so and gives the reason.

    Raises:
        HookContractError: As :func:`limits_of`.
    """
    limits = limits_of(platform)
    return {one: f"the platform {platform.name} has no {one.value}: {limits[one]}" for one in asked if one in limits}


def features_asked(traits: ModelTraits, sizes: ParallelSizes) -> list[Feature]:
    """Return the features that a model requires of a platform, by its traits and its parallel sizes."""
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
