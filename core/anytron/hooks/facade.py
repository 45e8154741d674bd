"""The typed facade over all plugins: one method per hook. Core and backends call this and nothing else.

Implementations are resolved once, when the facade is made, so that a call costs a loop over a tuple.
The order does not depend on who was found first: the active platform, then extensions in order of
name, then the neutral default. Every answer is held against the hook's contract, and what breaks it
is an error that names the plugin.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from anytron.config.diagnostics import Diagnostic, refuse
from anytron.errors import HookContractError, PluginError
from anytron.hooks.edits import apply_edits
from anytron.hooks.registry import Call, Member, Standing, specifications
from anytron.hooks.trace import traced, tracing
from anytron.hooks.types import ConfigEdit, Requirement
from anytron.masks import check_mask

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.hooks.types import LayoutRequest, PatchContext, ProcessInfo
    from anytron.kernels.contract import (
        AttentionKernel,
        AttentionSpec,
        KernelName,
        KernelSpec,
        LogProbKernel,
        LogProbSpec,
    )
    from anytron.masks import AttnMask, MaskRequest
    from anytron.patches import Patch, Phase
    from anytron.sequences import LayoutConstraints, ModelInputs, SequenceLayout

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Implementation(NamedTuple):
    """Who answers a hook, and how to ask."""

    plugin: str
    call: Call


class Hooks:
    """Ask the plugins. Immutable: which plugins exist is settled when it is made.

    Args:
        members: The plugins, in any order: at most one platform, any number of extensions, and the
            neutral default.

    Raises:
        PluginError: Two members have one name, or two are platforms.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        ordered = sorted(members, key=lambda member: (member.standing, member.name))
        names = [member.name for member in ordered]
        if len(set(names)) < len(names) or [member.standing for member in ordered].count(Standing.PLATFORM) > 1:
            raise PluginError("Plugin names must be unique and at most one platform active.", why=", ".join(names))
        self.members = tuple(ordered)
        """In the order in which they are asked."""
        self._answers = {hook: self._resolve(hook, ordered) for hook in specifications()}
        platform_last = sorted(ordered, key=lambda member: (member.standing is Standing.PLATFORM, member.name))
        self._chain = self._resolve("preprocess_sequences", platform_last)

    @staticmethod
    def _resolve(hook: str, members: Iterable[Member]) -> tuple[Implementation, ...]:
        wrap: Callable[[str, str, Call], Call] = traced if tracing() else lambda _hook, _plugin, call: call
        return tuple(
            Implementation(member.name, wrap(hook, member.name, member.calls[hook]))
            for member in members
            if hook in member.calls
        )

    # ---- before the run -------------------------------------------------------------------------

    def requirements(self, engine: str | None = None) -> list[tuple[str, Requirement]]:
        """What each plugin needs: (plugin, requirement) pairs.

        Args:
            engine: The training engine of the run; None = no run in particular.
        """
        return [
            (plugin, requirement)
            for plugin, call in self._answers["requirements"]
            for requirement in _instances("requirements", plugin, call(engine), Requirement)
        ]

    def configure(self, config: RunConfig) -> tuple[RunConfig, list[tuple[str, ConfigEdit]], list[Diagnostic]]:
        """Let the plugins check and adapt the configuration.

        Returns:
            The configuration with all edits, validated again; the edits, each with the plugin it comes
            from; the warnings.

        Raises:
            ConfigError: A diagnostic of severity ``error`` (all of them in one message), an edit of
                a key that does not exist, two plugins that set one key to different values, or
                values that the schema refuses.
        """
        edits, diagnostics = self.remarks(config)
        refuse(diagnostics)
        return apply_edits(config, edits), edits, diagnostics

    def remarks(self, config: RunConfig) -> tuple[list[tuple[str, ConfigEdit]], list[Diagnostic]]:
        """Ask the plugins what they would change, and what they find wrong.

        All of them see the configuration as it was read, not each other's edits.

        Returns:
            The edits, each with the plugin it comes from; the diagnostics, whose messages name theirs.
        """
        edits: list[tuple[str, ConfigEdit]] = []
        diagnostics: list[Diagnostic] = []
        for plugin, call in self._answers["configure"]:
            for answer in _instances("configure", plugin, call(config), (ConfigEdit, Diagnostic)):
                if isinstance(answer, ConfigEdit):
                    edits.append((plugin, answer))
                else:
                    diagnostics.append(replace(answer, message=f"{answer.message} (plugin '{plugin}')"))
        return edits, diagnostics

    def runtime_env(self, process: ProcessInfo) -> dict[str, str]:
        """Environment variables for a process about to start.

        A variable that the user has set already keeps the user's value; if a plugin wanted another
        one, that is logged as a warning.

        Raises:
            PluginError: Two plugins give one variable different values.
        """
        merged = self._merge("runtime_env", process)
        for name, (plugin, value) in merged.items():
            if not isinstance(value, str):
                _break("runtime_env", plugin, "values are strings", f"{name} is {value!r}")
            present = os.environ.get(name, value)
            if present != value:
                logger.warning("%s=%s is kept as you set it; plugin '%s' wanted %s", name, present, plugin, value)
        return {name: os.environ.get(name, value) for name, (_, value) in merged.items()}

    # ---- building -------------------------------------------------------------------------------

    def patch_model(self, phase: Phase, context: PatchContext) -> list[Patch]:
        """The patches that all plugins need in this phase.

        Raises:
            HookContractError: A patch of another phase.
        """
        from anytron.patches import Patch

        patches: list[Patch] = []
        for plugin, call in self._answers["patch_model"]:
            for patch in _instances("patch_model", plugin, call(phase, context), Patch):
                if patch.phase is not phase:
                    why = f"asked for {phase.value}, patch {patch.id} is for {patch.phase.value}"
                    _break("patch_model", plugin, "patches belong to the phase that was asked for", why)
                patches.append(patch)
        return patches

    def layout_constraints(self, request: LayoutRequest) -> LayoutConstraints:
        """What the device asks of every layout; constraints of 1 if nothing is asked."""
        from anytron.sequences import LayoutConstraints

        merged = LayoutConstraints()
        for plugin, call in self._answers["layout_constraints"]:
            answer = call(request)
            if answer is not None:
                merged = merged.merge(_instance("layout_constraints", plugin, answer, LayoutConstraints))
        return merged

    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """The attention kernel of a layer."""
        kernel: AttentionKernel = self._kernel("attention_kernel", spec)
        return kernel

    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any]:
        """A fused kernel; its signature is that of the neutral default in :mod:`anytron.kernels`."""
        kernel: Callable[..., Any] = self._kernel("fused_kernel", name, spec)
        return kernel

    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel:
        """The kernel for token log-probs and entropies."""
        kernel: LogProbKernel = self._kernel("log_prob_kernel", spec)
        return kernel

    # ---- each micro-batch -----------------------------------------------------------------------

    def preprocess_sequences(self, inputs: ModelInputs) -> ModelInputs:
        """Send a finished micro-batch through the chain: extensions in order of name, then the platform.

        Raises:
            HookContractError: A plugin returned another layout, or ids or labels of another shape or dtype.
        """
        for plugin, call in self._chain:
            answer = call(inputs)
            if answer is not None and answer is not inputs:
                _check_inputs(plugin, inputs, answer)
                inputs = answer
        return inputs

    def build_attn_mask(self, request: MaskRequest, built: AttnMask | None = None) -> AttnMask:
        """The attention mask, in the form that the device's kernels read.

        Args:
            request: What is asked.
            built: The answer at engine build; None when this is that call.

        Raises:
            HookContractError: The answer breaks :func:`anytron.masks.check_mask`, or no plugin has one.
        """
        for plugin, call in self._answers["build_attn_mask"]:
            mask: AttnMask | None = call(request)
            if mask is not None:
                check_mask(mask, request, built, plugin)
                return mask
        raise _unanswered("build_attn_mask")

    def postprocess_output(self, values: Tensor, layout: SequenceLayout) -> Tensor:
        """Flat values ``[T, ...]`` from the model's output ``[R, C, ...]``.

        Raises:
            HookContractError: The answer has not exactly T entries.
        """
        for plugin, call in self._answers["postprocess_output"]:
            flat: Tensor | None = call(values, layout)
            if flat is not None:
                if flat.shape[0] != layout.num_tokens:
                    why = f"{flat.shape[0]} values for {layout.num_tokens} tokens"
                    _break("postprocess_output", plugin, "the answer has one entry per real token", why)
                return flat
        raise _unanswered("postprocess_output")

    def rollout_options(self, engine: str) -> dict[str, Any]:
        """Options for the engine that generates, by name.

        Raises:
            PluginError: Two plugins give one option different values.
        """
        return {name: value for name, (_, value) in self._merge("rollout_options", engine).items()}

    # ---- the ways of calling --------------------------------------------------------------------

    def _kernel(self, hook: str, *arguments: Any) -> Any:
        for plugin, call in self._answers[hook]:
            kernel = call(*arguments)
            if kernel is not None:
                if not callable(kernel):
                    _break(hook, plugin, "a kernel is callable", f"answered {kernel!r}")
                return kernel
        raise _unanswered(hook)

    def _merge(self, hook: str, argument: Any) -> dict[str, tuple[str, Any]]:
        """Union of mappings, each value with the plugin that gave it first."""
        merged: dict[str, tuple[str, Any]] = {}
        for plugin, call in self._answers[hook]:
            answer = call(argument) or {}
            if not isinstance(answer, Mapping):
                _break(hook, plugin, "the answer is a mapping", f"it is {type(answer).__name__}")
            for name, value in answer.items():
                owner, present = merged.setdefault(name, (plugin, value))
                if present != value:
                    raise PluginError(
                        f"Two plugins disagree on {name}.",
                        where=f"hook {hook}",
                        why=f"'{owner}' gives {present!r}, '{plugin}' gives {value!r}",
                        fix=f"disable one of them: ANYTRON_DISABLE_PLUGINS={plugin}",
                    )
        return merged


def _instance(hook: str, plugin: str, answer: Any, kind: type[T]) -> T:
    if not isinstance(answer, kind):
        _break(hook, plugin, f"the answer is a {kind.__name__}", f"it is {type(answer).__name__}")
    return answer


def _instances(hook: str, plugin: str, answers: Iterable[T] | None, kind: type[T] | tuple[type, ...]) -> list[T]:
    found = list(answers or ())
    for answer in found:
        if not isinstance(answer, kind):
            _break(hook, plugin, "the answer lists instances of the documented classes", f"got {answer!r}")
    return found


def _check_inputs(plugin: str, before: ModelInputs, after: ModelInputs) -> None:
    from anytron.sequences import ModelInputs

    hook = "preprocess_sequences"
    _instance(hook, plugin, after, ModelInputs)
    if after.layout is not before.layout:
        _break(hook, plugin, "the layout stays the same object", "it returned another layout")
    for name in ("input_ids", "labels"):
        old, new = getattr(before, name), getattr(after, name)
        if old.shape != new.shape or old.dtype != new.dtype:
            why = f"{name} was {old.dtype} {tuple(old.shape)} and became {new.dtype} {tuple(new.shape)}"
            _break(hook, plugin, "ids and labels keep shape and dtype", why)


def _break(hook: str, plugin: str, rule: str, why: str) -> NoReturn:
    raise HookContractError(
        f"{hook} of plugin '{plugin}' broke its contract: {rule}.", where=f"plugin {plugin}", why=why
    )


def _unanswered(hook: str) -> HookContractError:
    return HookContractError(
        f"No plugin answered {hook}.",
        why="every plugin left it to the next one and there is no neutral default among them",
        fix="make the facade with open_session or hooks_of of anytron.plugins, which add the neutral default",
    )
