"""The Acme platform: everything that Acme's device does differently."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from anytron import Availability, Decision, Feature, Limit, Platform, Probe
from anytron_acme.options import AcmeOptions

if TYPE_CHECKING:
    from pydantic import BaseModel

    from anytron import DeviceRuntime


class AcmePlatform(Platform):
    """Acme's device. Until you change :meth:`probe` and ``runtime.py``, it is the host's processor."""

    # Besides these there are visible_devices_variable, ray_resource and others: python -m pydoc anytron.Platform
    name = "acme"
    api_version = 1
    options_model = AcmeOptions
    device_packages = ()  # the import package that adds the device to torch, such as ("torch_acme",): others are hidden

    def __init__(self) -> None:
        self.options = AcmeOptions()

    def probe(self) -> Probe:
        """Return whether the device can be used, without initialising it.

        Query the driver here. USABLE: the platform is preferred to the processor. ABSENT, with a remedy: there is no
        such device, and another platform may be chosen. BROKEN, with a remedy: the device or its software exists but
        does not work.
        """
        reason = "anytron-acme computes on the host's processor, which all ranks share: it asks no driver"
        return Probe(Availability.USABLE, reason, devices=8)

    def runtime(self) -> DeviceRuntime:
        """The device: one object per process."""
        return _runtime()

    def configure_options(self, options: BaseModel | None) -> None:
        """Keep the validated ``platform.options``, before any hook is called."""
        if isinstance(options, AcmeOptions):
            self.options = options

    def decisions(self) -> tuple[Decision, ...]:
        """Return the choices that the first lines of each run show, with their reasons."""
        return (Decision("device", "the host's processor", "anytron_acme/runtime.py names no other"),)

    def limits(self) -> tuple[Limit, ...]:
        """Return the features that the device lacks, with reasons.

        Runs that need such a feature are refused, and the conformance kit skips the checks of the feature. Delete the
        limit below when ``runtime.py`` drives your device.
        """
        return (Limit(Feature.OWN_DEVICE, "anytron_acme/runtime.py names no device yet"),)

    # What to write next. A hook is a method with the decorator ``anytron.hookimpl``; take the arguments that you need,
    # and return None where the neutral default is enough. docs/reference/hooks.md in Anytron's repository has a
    # section for each hook; python -m pydoc anytron.device.hooks.specs shows the same text. Most authors write the
    # hooks in this order:
    #
    #   requirements           the packages that the device needs, with version ranges and remedies
    #   configure              settings that the device does not support (an error) or needs (an edit with its reason)
    #   runtime_env            environment variables that the device's libraries need in each process
    #   attention_kernel       the device's attention: most of the speed
    #   fused_kernel           norms, SwiGLU, rotary embedding, grouped products, Adam
    #   log_prob_kernel        log-probs and entropies without whole logits
    #   build_attn_mask        a form of mask, or a mode, that the kernels need and the neutral default does not have
    #   preprocess_sequences   information about a micro-batch for the device's libraries, in the micro-batch's scope
    #   postprocess_output     a faster way from the model's output to one value per token
    #   patch_model            changes of third-party code, each with its reason and version range
    #
    # docs/how-to/write-a-platform.md has an example of each kind, docs/how-to/check-your-kernels.md lists what kernels
    # must satisfy, and examples/third_party_platform is a complete package.


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_acme.runtime import AcmeRuntime  # which imports the device's libraries

    return AcmeRuntime()
