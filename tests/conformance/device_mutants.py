"""Platforms whose device, environment, options or patches are wrong."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from anytron import hookimpl
from anytron.device.patches import Installed, Patch, Phase
from anytron_cpu import CpuPlatform
from anytron_cpu.runtime import CpuRuntime
from tests.conformance.mutant import Mutant


def with_runtime(**methods):
    """Make ``runtime`` of a platform: the processor's, with some methods exchanged."""
    made = type("BrokenRuntime", (CpuRuntime,), methods)()
    return lambda self: made


REPLACED = {}
"""What mutants have replaced in their process: the originals, by owner and name."""


def replacing(owner, name, function):
    """Make ``runtime`` of a platform, which replaces a function of a library: ``function`` gets the original first."""

    def runtime(self):
        if (owner, name) not in REPLACED:
            REPLACED[owner, name] = original = getattr(owner, name)

            @functools.wraps(original)
            def replacement(*arguments, **more):
                return function(original, *arguments, **more)

            setattr(owner, name, replacement)
        return CpuPlatform.runtime(self)

    return runtime


def put_back():
    """Put back what mutants have replaced in this process."""
    while REPLACED:
        (owner, name), original = REPLACED.popitem()
        setattr(owner, name, original)


def peak_as_present(stats):
    return replace(stats, allocated=stats.peak_allocated, reserved=stats.peak_allocated)


def in_kibibytes(stats):
    return replace(stats, allocated=stats.allocated // 1024)


class NewRuntimeEachTime(Mutant):
    rule, says = "probe-and-runtime", "new object at each call"

    def runtime(self):
        return CpuRuntime()


class CountsNoDevice(Mutant):
    rule, says = "probe-and-runtime", "count different numbers of devices"
    runtime = with_runtime(device_count=lambda self: 0)


class SilentFallback(Mutant):
    rule, says = "own-device", "its tensors are on the processor"
    accelerator = True


class NoFloat32(Mutant):
    rule, says = "dtypes-compute", "float32"
    runtime = with_runtime(supports_dtype=lambda self, dtype: dtype is torch.bfloat16)


def of_ten_bits(number):
    """Round float32 as TF32 does: ten bits after the point."""
    return ((number.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


class RoundsConvolutions(Mutant):
    rule, says = "dtypes-compute", "The convolution is wrong"
    runtime = replacing(
        functional,
        "conv3d",
        lambda original, *operands: original(
            *(of_ten_bits(one) if one.dtype is torch.float32 else one for one in operands)
        ),
    )


class RestoresNothing(Mutant):
    rule, says = "rng-round-trip", "gives a different state"
    runtime = with_runtime(set_rng_state=lambda self, state: None)


class SavesAnotherGenerator(Mutant):
    rule, says = "rng-round-trip", "Other numbers were drawn after the state"
    other = torch.Generator()
    runtime = with_runtime(
        get_rng_state=lambda self: SavesAnotherGenerator.other.get_state(),
        set_rng_state=lambda self, state: SavesAnotherGenerator.other.set_state(state),
    )


class OneSeed(Mutant):
    rule, says = "seeds-decide", "drew the same numbers"
    runtime = with_runtime(manual_seed=lambda self, seed: torch.default_generator.manual_seed(1))


class OwnSeeds(Mutant):
    rule, says = "seeds-decide", "The same seed drew other numbers"
    runtime = with_runtime(manual_seed=lambda self, seed: None)


class AnotherGenerator(Mutant):
    rule, says = "own-generator", "as it was"
    runtime = with_runtime(default_generator=lambda self: torch.Generator())


class PeakForPresent(Mutant):
    rule, says = "memory-figures", "does not grow"

    runtime = with_runtime(memory_stats=lambda self: peak_as_present(CpuRuntime.memory_stats(self)))


class Kibibytes(Mutant):
    rule, says = "memory-figures", "by the size of a tensor"

    runtime = with_runtime(memory_stats=lambda self: in_kibibytes(CpuRuntime.memory_stats(self)))


class PeakStays(Mutant):
    rule, says = "peak-memory", "does not reset the peak"
    runtime = with_runtime(reset_peak_memory_stats=lambda self: None)


class KnowsNoEnd(Mutant):
    rule, says = "out-of-memory", "does not recognize the error"
    runtime = with_runtime(is_out_of_memory=lambda self, error: isinstance(error, torch.OutOfMemoryError))


class EverythingIsMemory(Mutant):
    rule, says = "out-of-memory", "takes another error"
    runtime = with_runtime(is_out_of_memory=lambda self, error: True)


class HalfAStream(Mutant):
    rule, says = "streams-order-work", "must both give a stream"
    runtime = with_runtime(new_stream=lambda self: object())


class InOrder:
    """A stream of a device that runs everything in order."""

    current = None

    def __enter__(self):
        self.before, type(self).current = InOrder.of_now(), self

    def __exit__(self, *_):
        type(self).current = self.before

    @classmethod
    def of_now(cls):
        cls.current = cls.current or cls()
        return cls.current

    def record_event(self):
        return object()

    def query(self):
        return True

    def wait_stream(self, other): ...
    def wait_event(self, event): ...
    def synchronize(self): ...


class TensorsForgetStreams(Mutant):
    """Streams work, and a tensor cannot be told which streams use it: the processor has no `record_stream`."""

    rule, says = "streams-order-work", "Tensor.record_stream raises an error"
    runtime = with_runtime(new_stream=lambda self: InOrder(), current_stream=lambda self: InOrder.of_now())


class PromisesPins(Mutant):
    rule, says = "pinned-memory", "is true, but pinning raises"
    runtime = with_runtime(can_pin_memory=lambda self: True)


class ChangingEnvironment(Mutant):
    rule, says = "environment-is-plain", "QUEUE"
    numbers = itertools.count()

    @hookimpl
    def runtime_env(self, process):
        return {"QUEUE": str(next(self.numbers))}


class NumericEnvironment(Mutant):
    rule, says = "environment-is-plain", "values must be strings"

    @hookimpl
    def runtime_env(self, process):
        return {"QUEUE": 1}


class RemembersTheRun(Mutant):
    rule, says = "environment-is-plain", "after configure was asked about another run"
    deterministic = False

    @hookimpl
    def configure(self, config):
        self.deterministic = config.engine.deterministic
        return []

    @hookimpl
    def runtime_env(self, process):
        return {"QUEUE_DETERMINISTIC": str(self.deterministic)}


class Cluster:
    @hookimpl
    def runtime_env(self, process):
        return {"QUEUE": "2"}


class ConflictingEnvironment(Mutant):
    rule, says = "environment-agrees", "'cluster' gives '2'"
    extensions = {"cluster": Cluster()}  # noqa: RUF012

    @hookimpl
    def runtime_env(self, process):
        return {"QUEUE": "1"}


class Loose(BaseModel):
    tile: int = 8


class IgnoresOptions(Mutant):
    rule, says = "options-are-typed", "no_such_option"
    options_model = Loose


class Undefined(BaseModel):
    tile: int


class NoDefaults(Mutant):
    rule, says = "options-are-typed", "no defaults"
    options_model = Undefined


class TwoDecisions(Mutant):
    rule, says = "says-what-it-is", "is not a Decision"

    def decisions(self):
        return ["tile"]


class LimitWithoutReason(Mutant):
    rule, says = "says-what-it-is", "a Feature and a reason"

    def limits(self):
        return ["mla"]


def nothing(context):
    return Installed(lambda: None)


def for_ever(context):
    from tests.conformance import vendor

    vendor.TILE = 8
    return Installed(lambda: None)


class WithPatch(Mutant):
    install = ""

    @hookimpl
    def patch_model(self, phase, context):
        if phase is not Phase.BEFORE_BUILD:
            return []
        patch = Patch(
            id="mutant.tile",
            target="tests.conformance.vendor",
            phase=phase,
            reason="the library knows one tile size only",
            install=f"tests.conformance.device_mutants:{self.install}",
        )
        return [patch]


class PatchDoesNothing(WithPatch):
    rule, says = "patches-take-effect", "changes nothing"
    install = "nothing"


class PatchStays(WithPatch):
    rule, says = "patches-take-effect", "left tests.conformance.vendor changed"
    install = "for_ever"


class PatchOfNothing(WithPatch):
    rule, says = "patches-take-effect", "could not be applied"
    install = "missing"


def averaged(all_reduce, tensor, *arguments, **more):
    work = all_reduce(tensor, *arguments, **more)
    tensor.div_(distributed.get_world_size())
    return work


class AveragingSum(Mutant):
    rule, says = "collective-results", "The result of 'sum' is wrong"
    runtime = replacing(distributed, "all_reduce", averaged)


def reversed_parts(gather, found, own, *arguments, **more):
    work = gather(found, own, *arguments, **more)
    found.copy_(found.view(distributed.get_world_size(), -1).flip(0).flatten())
    return work


class ReversedGather(Mutant):
    rule, says = "collective-results", "'all-gather' is wrong"
    runtime = replacing(distributed, "all_gather_into_tensor", reversed_parts)


def computed_elsewhere(cumsum, tensor, *arguments, **more):
    return cumsum(tensor.detach(), *arguments, **more).to("meta")


class LeavesResultsElsewhere(Mutant):
    """An operator's result stays where another device computed it. ``meta`` stands for that device."""

    rule, says = "tensors-stay", "The result is on another device"
    runtime = replacing(torch.Tensor, "cumsum", computed_elsewhere)


def queued(copy, target, source, non_blocking=False):
    return target if non_blocking else copy(target, source)


class NeverCopies(Mutant):
    """Copies that block nobody stay in their queue; synchronize does not wait for them."""

    rule, says = "synchronize-waits", "is incomplete after synchronize"
    runtime = replacing(torch.Tensor, "copy_", queued)


class SetsItsOwnEnvironment(Mutant):
    rule, says = "environment-reaches-ranks", "QUEUE is not what runtime_env sets"
    runtime = with_runtime(set_device=lambda self, index: os.environ.update(QUEUE="2"))

    @hookimpl
    def runtime_env(self, process):
        return {"QUEUE": "1"}


def first_of_all(runtime):
    if not distributed.is_initialized():
        return CpuRuntime.current_device(runtime)
    FakeTensorMode().__enter__()
    return torch.device("xpu", 0)


class SharesTheFirstDevice(Mutant):
    """Every rank's tensors are on device 0. Numbered devices are torch's fake ones: the processor has no number."""

    rule, says = "ranks-own-devices", "on another rank's device"
    runtime = with_runtime(current_device=first_of_all)
