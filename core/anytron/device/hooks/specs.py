"""The hooks: everything that a device may do differently.

``docs/reference/hooks.md`` is generated from this module. Each docstring says when a
hook is called, how often and in which process, its arguments, its results, and which answers are
errors. Implementations may take any subset of the arguments, by name. None always means "no
answer".

The kind of a hook says how it is called:

- ``all``: every plugin is asked, and the answers are collected.
- ``first``: the active platform is asked, then extensions in order of name, then the neutral
  default, which is Anytron's implementation in plain torch; the first answer that is not None counts.
- ``chain``: extensions in order of name and then the platform, each receiving what the previous one
  returned.
- ``merge``: every plugin is asked for a mapping; two plugins that set one name to different values are
  an error.

An implementation is marked with ``anytron.hookimpl``. A function of a plugin that has a hook's name
and no marker is an error, because it would never be called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import ConfigEdit, PatchContext, ProcessInfo, Requirement
    from anytron.device.patches import Patch, Phase
    from anytron.kernels.contract import (
        AttentionKernel,
        AttentionSpec,
        KernelName,
        KernelSpec,
        LogProbKernel,
        LogProbSpec,
    )
    from anytron.sequences.layout import ModelInputs, SequenceLayout
    from anytron.sequences.masks import AttnMask, MaskRequest

PROJECT = "anytron"
KIND = f"{PROJECT}_kind"
"""The attribute by which a specification is recognised."""
Kind = Literal["all", "first", "chain", "merge"]
"""How a hook is called; :mod:`anytron.device.hooks.specs` says what each kind means."""
Specification = TypeVar("Specification", bound="Callable[..., Any]")
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or a method as the implementation of the hook of its name."""


def hookspec(kind: Kind) -> Callable[[Specification], Specification]:
    """Mark a function as the specification of the hook with its name; ``kind`` says how that hook is called."""

    def mark(function: Specification) -> Specification:
        setattr(function, KIND, kind)
        return function

    return mark


@hookspec("all")
def requirements(engine: str | None) -> Iterable[Requirement] | None:
    """Name the packages that the plugin needs.

    Called: once per process, before anything heavy is imported, and by ``anytron plugins list`` and
    ``anytron doctor``.

    Arguments: ``engine``, the training engine of the run (``engine.name``); None = no run in particular.

    Returns: requirements; a requirement that is not optional stops the run if the package is missing or out of range.
    """


@hookspec("all")
def configure(config: RunConfig) -> Iterable[ConfigEdit | Diagnostic] | None:
    """Check the run's configuration and adapt it to the device.

    Called: once, in the driver, after the configuration was read and validated and
    before any process starts.

    Arguments: ``config``, complete; it must not be changed in place.

    Returns: edits, applied and shown with their reasons, and diagnostics. Two plugins that set one
    key to different values, an edit of a key that does not exist, and a diagnostic of severity
    ``error`` stop the run. An edit with ``default=True`` does not change a key that the user has set, for example an
    option of the rollout engine (``rollout.options.enforce_eager``).
    """


@hookspec("merge")
def runtime_env(process: ProcessInfo, config: RunConfig) -> Mapping[str, str] | None:
    """Set environment variables of a process that is about to start.

    Called: in the driver, once for each worker process; in that worker process, before it loads the device's
    libraries, where the answer must be the same as in the driver; and by ``anytron doctor`` and the conformance
    kit in their own processes.

    Arguments: ``config``, complete, with the edits of all plugins. Where there is no run, it is
        ``anytron.config.schema.default_run()``: each key has its default, unless the caller sets it.

    Returns: variables. A variable that the user has set already keeps the user's value; a different
    value from a plugin is reported as a warning.
    """


@hookspec("all")
def patch_model(phase: Phase, context: PatchContext) -> Iterable[Patch] | None:
    """Name the patches that the plugin needs in third-party code.

    Called: once for each phase, in every worker process: ``before_import`` (nothing of
    the engine is imported), ``before_parallel_init``, ``before_build``, ``after_build``.

    Returns: patches as data. The ledger orders, applies, verifies and records them; a hook never
    patches anything itself. Two owners that patch one target are an error that names both.
    """


@hookspec("chain")
def preprocess_sequences(inputs: ModelInputs) -> ModelInputs | None:
    """Adapt a finished micro-batch to the device.

    Called: exactly once per micro-batch and forward pass, on every training rank, after
    all padding is decided and before the mask is built.

    Arguments: ``inputs``, immutable, of R rows and C columns; ``input_ids`` is int64 ``[R, C]``, ``position_ids`` too,
        or ``[3, R, C]`` for vision-language models.

    Returns: a changed copy, or None to change nothing. The copy must keep the layout object, the shape and dtype of
        ids, labels and positions, and the position ids of real tokens. State that the device keeps globally
    goes into ``inputs.scope`` and nowhere else: ``scopes.combine(inputs.scope, mine)``
    (``anytron.sequences.scopes``), where ``mine`` is a function without arguments that makes a fresh
    context manager each time it is called.
    """


@hookspec("first")
def build_attn_mask(request: MaskRequest) -> AttnMask | None:
    """Return the attention mask in the form that the device's kernels read.

    Called: once when the engine is built (``request.layout`` is None, and the mask has a kind and a kernel mode but no
        tensor), and once per micro-batch.

    Returns: a mask whose kind is in ``request.accepted``; its tensors are bool, and its ``polarity`` says what True
        means; rows of padding may be fully masked. Kind and kernel mode depend on traits, format and parallel sizes
    only: a later answer of another kind is an error. None = the next plugin is asked.
    """


@hookspec("first")
def postprocess_output(values: Tensor, layout: SequenceLayout) -> Tensor | None:
    """Turn the model's per-token output into flat values.

    Called: once per micro-batch and output tensor, on ranks of the last pipeline stage.

    Arguments: ``values``, this rank's float ``[R, C, ...]``; ``layout``, the layout of the input. No
    mask is passed: the layout says which positions are real.

    Returns: ``[T, ...]``, differentiable: one entry for each real token, in the order of the input sequences. With
        context parallelism, values are gathered over its ranks, and the gradient flows through the local slice only.
    None = the next plugin is asked; the neutral default handles every layout.
    """


@hookspec("first")
def attention_kernel(spec: AttentionSpec) -> AttentionKernel | None:
    """Supply the attention kernel of a layer.

    Called: once per attention layer when the model is built; the kernel is then called
    directly.

    Returns: a callable as :class:`anytron.kernels.contract.AttentionKernel` describes it, or None. Runs with
    ``engine.on_policy=bitwise`` ask with ``spec.invariant``. Then the kernel must be company-invariant: the bits of a
    row's result do not depend on what else is in the call. It must say so by an attribute ``invariant`` that is True; a
    kernel without it is an error, and None means that the next plugin is asked. The rules ``invariant-...`` of
    ``anytron conformance`` check it. A platform whose device cannot compute so has a limit ``company-invariance``.
    """


@hookspec("first")
def fused_kernel(name: KernelName, spec: KernelSpec) -> Callable[..., Any] | None:
    """Supply a fused kernel.

    Called: once per name and module when the model or the optimizer is built.

    Returns: a callable with the signature of the kernel's neutral default in ``anytron.kernels.fused``
    (listed below), or None. This and other kernels may have an attribute ``description``, which says which
    implementation is used and why no faster one is: it is logged once, and recorded in ``patches.json``. With
    ``spec.invariant`` the kernel has the attribute ``invariant``, as that of ``attention_kernel``; kernels of
    linear attention and ``adam`` are never asked for it.
    """


@hookspec("first")
def log_prob_kernel(spec: LogProbSpec) -> LogProbKernel | None:
    """Supply the kernel that computes token log-probs and entropies.

    Called: once per model when the engine is built.

    Returns: a callable as :class:`anytron.kernels.contract.LogProbKernel` describes it, or None. With
    ``spec.invariant`` the kernel has the attribute ``invariant``, as that of ``attention_kernel``.
    """
