"""The hooks: everything that a device may do differently.

This is the reference that ``docs/reference/hooks.md`` is generated from. Each docstring says when a
hook is called, how often, in which process, what goes in, what comes out, and which answers are
errors. Implementations may take any subset of the arguments, by name.

Three ways of calling exist. *All*: every plugin answers and the answers are collected or merged.
*First answer*: the active platform, then extensions, then the neutral default; the first that is
not None counts. *Chain*: extensions in order of name, then the platform, each receiving what the
one before returned. None always means "nothing to say".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.hooks.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig
    from anytron.hooks.types import ConfigEdit, LayoutRequest, PatchContext, ProcessInfo, Requirement
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


@hookspec
def requirements(engine: str | None) -> Iterable[Requirement] | None:
    """Name the packages that the plugin needs.

    Called: all plugins, once per process, before anything heavy is imported, and by
    ``anytron plugins list`` and ``anytron doctor``.

    Arguments: ``engine``, the training engine of the run (``engine.name``); None = no run in particular.

    Returns: requirements; a missing or unfitting one that is not optional stops the run.
    """


@hookspec
def configure(config: RunConfig) -> Iterable[ConfigEdit | Diagnostic] | None:
    """Check the run's configuration and adapt it to the device.

    Called: all plugins, once, in the driver, after the configuration was read and validated and
    before any process starts.

    Arguments: ``config``, complete; it must not be changed in place.

    Returns: edits, applied and shown with their reasons, and diagnostics. Two plugins that set one
    key to different values, an edit of a key that does not exist, and a diagnostic of severity
    ``error`` stop the run.
    """


@hookspec
def runtime_env(process: ProcessInfo) -> Mapping[str, str] | None:
    """Give environment variables to a process that is about to start.

    Called: all plugins, in the driver, once for each worker process.

    Returns: variables. They are merged; two plugins that give one variable different values is an
    error. A variable that the user has set already keeps the user's value; a different wish is
    reported as a warning.
    """


@hookspec
def patch_model(phase: Phase, context: PatchContext) -> Iterable[Patch] | None:
    """Name the patches that the plugin needs in third-party code.

    Called: all plugins, once for each phase, in every worker process: ``before_import`` (nothing of
    the engine is imported), ``before_parallel_init``, ``before_build``, ``after_build``.

    Returns: patches as data. The ledger orders, applies, verifies and records them; a hook never
    patches anything itself. Two owners of one target is an error that names both.
    """


@hookspec
def layout_constraints(request: LayoutRequest) -> LayoutConstraints | None:
    """Say what the device asks of every sequence layout.

    Called: all plugins, once, when the engine is built, on every training rank.

    Returns: alignment and bucket in tokens; answers are merged (least common multiples). None asks
    for nothing.
    """


@hookspec
def preprocess_sequences(inputs: ModelInputs) -> ModelInputs | None:
    """Adapt a finished micro-batch to the device.

    Called: as a chain, exactly once per micro-batch and forward pass, on every training rank, after
    all padding is decided and before the mask is built.

    Arguments: ``inputs``, immutable; ``input_ids`` int64 ``[R, C]``, ``position_ids`` the same or,
    for vision-language models, ``[3, R, C]``.

    Returns: a changed copy, or None for "as it is". The layout must stay the same object. State
    that the device keeps globally goes into ``inputs.scope`` and nowhere else.
    """


@hookspec(firstresult=True)
def build_attn_mask(request: MaskRequest) -> AttnMask | None:
    """Give the attention mask in the form that the device's kernels read.

    Called: first answer. Once when the engine is built (``request.layout`` is None: answer kind and
    kernel mode, no tensor) and once per micro-batch.

    Returns: a mask whose kind is in ``request.accepted``; bool tensors, polarity stated; rows of
    padding may be fully masked. Kind and kernel mode depend on traits, format and parallel sizes
    only: a later answer of another kind is an error. None leaves it to the next plugin.
    """


@hookspec(firstresult=True)
def postprocess_output(values: Tensor, layout: SequenceLayout) -> Tensor | None:
    """Turn the model's per-token output into flat values.

    Called: first answer, once per micro-batch and output tensor, on ranks of the last pipeline stage.

    Arguments: ``values`` float ``[R, C, ...]`` of this rank, ``layout`` as it went in. No mask: what
    is real stands in the layout.

    Returns: ``[T, ...]``, in the order of the input sequences, without padding, differentiable; with
    context parallelism gathered over its ranks, the gradient flowing through the local slice only.
    None leaves it to the neutral default, which handles every layout.
    """


@hookspec(firstresult=True)
def attention_kernel(spec: AttentionSpec) -> AttentionKernel | None:
    """Supply the attention kernel of a layer.

    Called: first answer, once per attention layer when the model is built; the kernel is then called
    directly.

    Returns: a callable as :class:`anytron.kernels.contract.AttentionKernel` describes it, or None.
    """


@hookspec(firstresult=True)
def fused_kernel(name: KernelName, spec: KernelSpec) -> Callable[..., Any] | None:
    """Supply a fused kernel.

    Called: first answer, once per name and module when the model or the optimizer is built.

    Returns: a callable with the signature of the kernel's neutral default in ``anytron.kernels``, or
    None.
    """


@hookspec(firstresult=True)
def log_prob_kernel(spec: LogProbSpec) -> LogProbKernel | None:
    """Supply the kernel that computes token log-probs and entropies.

    Called: first answer, once per model when the engine is built.

    Returns: a callable as :class:`anytron.kernels.contract.LogProbKernel` describes it, or None.
    """


@hookspec
def rollout_options(engine: str) -> Mapping[str, Any] | None:
    """Give options to the engine that generates.

    Called: all plugins, once, in the driver, before the rollout process starts.

    Arguments: ``engine``, the name in ``rollout.engine``.

    Returns: options of that engine; merged, a conflict is an error, and what the user set wins.
    """
