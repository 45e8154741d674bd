"""The typed facade over all plugins: one method per hook. Core and backends call plugins only through it.

Each specification says the kind of its hook, and :mod:`anytron.device.hooks.dispatch` implements the call of each kind.
Implementations are resolved once, when the facade is made, so that a call costs a loop over a tuple. Every answer is
checked against the hook's contract; an answer that breaks it is an error that names the plugin.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from anytron.base.errors import PluginError
from anytron.config.diagnostics import Diagnostic, refuse
from anytron.device.hooks.dispatch import WAYS, Implementation, InputChecks, broken, in_order, traced, tracing
from anytron.device.hooks.edits import apply_edits, is_set
from anytron.device.hooks.registry import Call, HookSpec, Member, Precedence, specifications
from anytron.device.hooks.types import ConfigEdit, Requirement
from anytron.kernels.contract import NEVER_INVARIANT, AttentionSpec, KernelSpec, LogProbSpec
from anytron.sequences.masks import check_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import PatchContext, ProcessInfo
    from anytron.device.patches import Patch, Phase
    from anytron.kernels.contract import AttentionKernel, KernelName, LogProbKernel
    from anytron.sequences.layout import ModelInputs, SequenceLayout
    from anytron.sequences.masks import AttnMask, MaskRequest

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec", AttentionSpec, KernelSpec, LogProbSpec)


class Hooks:
    """Call the hooks of all plugins. The set of plugins is fixed at construction.

    Args:
        members: The plugins, in any order: at most one platform, any number of extensions, and the
            neutral default.

    Raises:
        PluginError: Two members have one name, or two are platforms.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(in_order("first", tuple(members)))
        """The plugins in the order in which hooks of kind ``first`` ask them."""
        names = [member.name for member in self.members]
        platforms = [member.name for member in self.members if member.precedence is Precedence.PLATFORM]
        if len(set(names)) < len(names):
            raise PluginError(
                "Two plugins have the same name.",
                where="argument members of Hooks(members)",
                why=f"the plugins are {', '.join(names)}",
                fix="give each plugin a unique name",
            )
        if len(platforms) > 1:
            raise PluginError(
                "Two plugins are platforms, but at most one plugin may be a platform.",
                where="argument members of Hooks(members)",
                why=f"the platforms are {', '.join(platforms)}",
                fix="leave only the platform of this process in members",
            )
        self._ask = {hook: self._way_to_ask(spec) for hook, spec in specifications().items()}
        self._check_inputs = InputChecks()
        self._suppliers: dict[str, set[str]] = {}
        self._descriptions: dict[str, set[str]] = {}
        self.invariant = False
        """Whether kernels must be company-invariant; an engine sets it before it builds models."""

    def _way_to_ask(self, hook: HookSpec) -> Callable[..., Any]:
        wrap: Callable[[str, str, Call], Call] = traced if tracing() else lambda _hook, _plugin, call: call
        implementations = [
            Implementation(member.name, wrap(hook.name, member.name, member.calls[hook.name]))
            for member in in_order(hook.kind, self.members)
            if hook.name in member.calls
        ]
        return WAYS[hook.kind](hook.name, tuple(implementations))

    def suppliers(self) -> dict[str, str]:
        """Return which plugin supplied which kernel to this process, for example ``{"log_prob_kernel": "acme"}``.

        Fused kernels are listed by name (``fused_kernel rms_norm``). If several plugins supplied the same kernel for
        different layers, all of them are named.
        """
        return {kernel: ", ".join(sorted(plugins)) for kernel, plugins in sorted(self._suppliers.items())}

    def forget_suppliers(self) -> None:
        """Let :meth:`suppliers` start anew: it then names the kernels that are requested from now on."""
        self._suppliers.clear()

    def kernel_descriptions(self) -> dict[str, list[str]]:
        """Return the descriptions of the kernels in :meth:`suppliers` that have an attribute ``description``.

        A platform that chooses between implementations uses the attribute to say which one is in use, and why no faster
        one is.
        """
        return {kernel: sorted(found) for kernel, found in sorted(self._descriptions.items())}

    # ---- before the run -------------------------------------------------------------------------

    def requirements(self, engine: str | None = None) -> list[tuple[str, Requirement]]:
        """The packages that plugins need: (plugin, requirement) pairs.

        Args:
            engine: The training engine of the run; None = no run in particular.
        """
        return self._items("requirements", Requirement, engine)

    def configure(self, config: RunConfig) -> tuple[RunConfig, list[tuple[str, ConfigEdit]], list[Diagnostic]]:
        """Let the plugins check and adapt the configuration.

        Returns:
            The configuration with all edits, validated again; the edits, each with the plugin that asked for
            it; the warnings.

        Raises:
            ConfigError: A diagnostic of severity ``error`` (all of them in one message), an edit of
                a key that does not exist, two plugins that set one key to different values, or
                values that the schema refuses.
        """
        edits, diagnostics = self.remarks(config)
        refuse(diagnostics)
        return apply_edits(config, edits), edits, diagnostics

    def remarks(self, config: RunConfig) -> tuple[list[tuple[str, ConfigEdit]], list[Diagnostic]]:
        """Ask the plugins for their edits and their diagnostics.

        Each plugin sees the configuration as it was read, without the edits of other plugins.

        Returns:
            The edits, each with the plugin that asked for it, without defaults of keys that the user has set; the
            diagnostics, whose messages name their plugin.
        """
        answers = self._items("configure", (ConfigEdit, Diagnostic), config)
        edits = [
            (plugin, answer)
            for plugin, answer in answers
            if isinstance(answer, ConfigEdit) and not (answer.default and is_set(config, answer.key))
        ]
        diagnostics = [
            replace(answer, message=f"{answer.message} (plugin '{plugin}')")
            for plugin, answer in answers
            if isinstance(answer, Diagnostic)
        ]
        return edits, diagnostics

    def runtime_env(self, process: ProcessInfo, config: RunConfig) -> dict[str, str]:
        """Environment variables for a process about to start.

        A variable that is set already keeps its value; if a plugin wanted another one, that is logged as a warning.

        Args:
            process: The process.
            config: The run's configuration with all edits, or :func:`anytron.config.schema.default_run`.

        Raises:
            PluginError: Two plugins give one variable different values.
        """
        merged = self._ask["runtime_env"](process, config)
        for name, (plugin, value) in merged.items():
            if not isinstance(value, str):
                raise broken("runtime_env", plugin, "the values must be strings", f"{name} is {value!r}")
            present = os.environ.get(name, value)
            if present != value:
                logger.warning(
                    "the environment variable %s keeps its value %s; plugin '%s' wanted %s",
                    name,
                    present,
                    plugin,
                    value,
                )
        return {name: os.environ.get(name, value) for name, (_, value) in merged.items()}

    # ---- building -------------------------------------------------------------------------------

    def patch_model(self, phase: Phase, context: PatchContext) -> list[Patch]:
        """The patches that all plugins need in this phase.

        Raises:
            HookContractError: A plugin returned a patch of another phase.
        """
        from anytron.device.patches import Patch

        patches: list[tuple[str, Patch]] = self._items("patch_model", Patch, phase, context)
        for plugin, patch in patches:
            if patch.phase is not phase:
                why = f"it was called for {phase.value}, but patch {patch.id} is for {patch.phase.value}"
                raise broken("patch_model", plugin, "its patches must belong to the phase that it was called for", why)
        return [patch for _, patch in patches]

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """The attention kernel of a layer."""
        kernel: AttentionKernel = self._kernel("attention_kernel", "attention_kernel", self._asked(spec))
        return kernel

    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any]:
        """A fused kernel, with the signature of the neutral default in :mod:`anytron.kernels.fused`."""
        spec = spec if name in NEVER_INVARIANT else self._asked(spec)
        kernel: Callable[..., Any] = self._kernel(f"fused_kernel {name.value}", "fused_kernel", name, spec)
        return kernel

    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel:
        """The kernel for token log-probs and entropies."""
        kernel: LogProbKernel = self._kernel("log_prob_kernel", "log_prob_kernel", self._asked(spec))
        return kernel

    # ---- each micro-batch -----------------------------------------------------------------------

    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs:
        """Let the plugins adapt a finished micro-batch, one after the other: extensions by name, then the platform.

        Raises:
            HookContractError: A plugin breaks a rule of :class:`anytron.device.hooks.dispatch.InputChecks`.
        """
        for plugin, changed in self._ask["preprocess_sequences"](inputs):
            self._check_inputs(plugin, inputs, changed)
            inputs = changed
        return inputs

    def build_attn_mask(self, request: MaskRequest, built: AttnMask | None = None) -> AttnMask:
        """The attention mask, in the form that the device's kernels read.

        Args:
            request: Layout, traits and accepted kinds.
            built: The mask returned when the engine was built; None during that first call.

        Raises:
            HookContractError: The answer breaks a rule of :func:`anytron.sequences.masks.check_mask`, or no plugin
                gives an answer.
        """
        mask: AttnMask
        plugin, mask = self._ask["build_attn_mask"](request)
        check_mask(mask, request, built, plugin)
        return replace(mask, plugin=plugin)

    def postprocess_output(self, values: Tensor, layout: SequenceLayout) -> Tensor:
        """Convert the model's output ``[R, C, ...]`` into flat values ``[T, ...]`` of the real tokens.

        Raises:
            HookContractError: The answer does not have exactly T entries, one for each real token.
        """
        flat: Tensor
        plugin, flat = self._ask["postprocess_output"](values, layout)
        if flat.shape[0] != layout.num_tokens:
            why = f"it has {flat.shape[0]} entries for {layout.num_tokens} tokens"
            raise broken("postprocess_output", plugin, "its result must have one entry for each real token", why)
        return flat

    # ---- checks of several hooks ----------------------------------------------------------------

    def _items(self, hook: str, kind: type | tuple[type, ...], *arguments: Any) -> list[tuple[str, Any]]:
        """The items of every plugin's answer, each an instance of ``kind``, with the plugin."""
        items = [(plugin, item) for plugin, answer in self._ask[hook](*arguments) for item in answer]
        for plugin, item in items:
            if not isinstance(item, kind):
                names = " and ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
                raise broken(hook, plugin, f"its result may list only objects of {names}", f"it lists {item!r}")
        return items

    def _asked(self, spec: Spec) -> Spec:
        return replace(spec, invariant=True) if self.invariant else spec

    def _kernel(self, label: str, hook: str, *arguments: Any) -> Any:
        """The first kernel, and a note of who supplied it."""
        plugin, kernel = self._ask[hook](*arguments)
        if not callable(kernel):
            raise broken(hook, plugin, "a kernel must be callable", f"it returned {kernel!r}")
        own = any(one.name == plugin and one.precedence is Precedence.DEFAULT for one in self.members)
        if arguments[-1].invariant and not own and getattr(kernel, "invariant", False) is not True:
            rule = "a kernel for a spec with invariant=True must say so: its attribute invariant is True"
            raise broken(hook, plugin, rule, f"{label} has no such attribute; the hook may return None instead")
        self._suppliers.setdefault(label, set()).add(plugin)
        description = getattr(kernel, "description", None)
        if description is not None and description not in self._descriptions.setdefault(label, set()):
            self._descriptions[label].add(description)
            logger.info("%s: %s", label, description)
        return kernel
