"""The probes of a device, one function each, and what they share. They run in a separate process.

Attention and log-probs are computed by the platform's kernels and compared with their definition in float64. Which
tokens attend to which is measured by influence: one key and its value are changed at a time, and a query whose output
changes attends to that key. So no kernel mode has to be known by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import ConfigError
from anytron.base.traits import AttentionHeads, ModelTraits, ParallelSizes
from anytron.device.platform import Feature, LayoutRequest, layout_constraints_of, limits_of
from anytron.kernels.contract import AttentionCall, AttentionSpec, KernelName, KernelSpec, LogProbSpec
from anytron.kernels.oracles.attention import LENGTHS, TOLERANCE, described, drawn_operands, largest_difference
from anytron.kernels.oracles.formulas import reference_log_probs
from anytron.kernels.oracles.masks import defined_pairs, influence
from anytron.run.preflight.limits import asked_by_model
from anytron.sequences import scopes
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.masks import MaskKind, MaskRequest, Polarity, scope_of
from anytron.sequences.planning import plan_layout
from anytron.task.data.model_files import logits_fields, read_config
from anytron.workers.executor.protocol import ExaminedExecutor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.device.runtime import DeviceRuntime
    from anytron.kernels.contract import AttentionKernel
    from anytron.kernels.oracles.masks import Attend
    from anytron.sequences.layout import Format, SequenceLayout
    from anytron.sequences.masks import AttnMask


GAPS = LayoutConstraints(align=4)
"""Padding between sequences, so that real and padded offsets differ."""


def probe_attention(bench: Bench, sequence_format: Format, *, windowed: bool = False) -> dict[str, Any]:
    """Compute attention on the device, as a layer of the model does, with a sliding window or without.

    Returns:
        ``difference`` and ``tolerance``, ``wrong`` (number of pairs of tokens that are wrongly included or hidden),
        ``detail`` (what was computed), ``supplier`` (plugin of the kernel) and ``mask_from`` (plugin of the mask).
    """
    hooks, spec, device = bench.session.hooks, bench.attention(windowed=windowed), bench.runtime.current_device()
    wanted = LayoutRequest(sequence_format, bench.traits, bench.sizes)
    constraints = layout_constraints_of(bench.session.platform, wanted).merge(GAPS)
    layout = plan_layout(LENGTHS, format=sequence_format, constraints=constraints).to(device)
    accepted = {MaskKind.NONE} if sequence_format == "thd" else {MaskKind.NONE, MaskKind.FULL_4D}
    request = MaskRequest(sequence_format, bench.traits, bench.sizes, frozenset(accepted))
    built = hooks.build_attn_mask(request)
    tokens = torch.zeros(layout.num_tokens, dtype=torch.int64, device=device)
    inputs = ModelInputs(
        layout=layout,
        input_ids=layout.pack(tokens),
        position_ids=layout.position_ids,
        labels=layout.next_tokens(tokens),
        extra={},
    )
    inputs = hooks.preprocess_sequences(inputs)
    request = MaskRequest(sequence_format, bench.traits, bench.sizes, frozenset(accepted), inputs.layout)
    mask = hooks.build_attn_mask(request, built)
    kernel = hooks.attention_kernel(spec)
    sinks = torch.linspace(-1, 2, spec.num_heads).to(device, bench.dtype).requires_grad_() if spec.sinks else None
    operands = drawn_operands(AttentionHeads(spec.num_heads, spec.num_kv_heads, spec.qk_dim, spec.v_dim), bench.dtype)
    with scopes.enter(scopes.combine(inputs.scope, scope_of(mask))):
        attend = _attend(kernel, replace(_call(mask, layout), sinks=sinks), layout)
        found = influence(attend, operands, layout, device)
        difference = largest_difference(attend, operands, layout, scale=spec.scale, traits=spec.traits, sinks=sinks)
    bench.runtime.synchronize()
    wrong = found ^ defined_pairs(LENGTHS, spec.traits)
    layer = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.qk_dim}/{spec.v_dim}, {bench.dtype}"
    layer += f", a window of {spec.traits.window[0] + 1} tokens" if spec.traits.window else ""
    return {
        "difference": difference,
        "tolerance": TOLERANCE[bench.dtype],
        "wrong": len(wrong),
        "detail": f"{sequence_format} '{mask.kernel_mode}' {described(wrong)}, {layer}{', sinks' * spec.sinks}",
        "supplier": hooks.suppliers()["attention_kernel"],
        "mask_from": mask.plugin,
    }


def _call(mask: AttnMask, layout: SequenceLayout) -> AttentionCall:
    if layout.format == "bshd":
        tensor = mask.read_as(Polarity.MASKED)
        return AttentionCall("bshd", mask.kernel_mode, mask=tensor, mode_from=mask.plugin)
    real, padded, longest = layout.cu_seqlens, layout.cu_seqlens_padded, layout.max_seqlen
    return AttentionCall("thd", mask.kernel_mode, real, real, padded, padded, longest, longest, mode_from=mask.plugin)


def _attend(kernel: AttentionKernel, call: AttentionCall, layout: SequenceLayout) -> Attend:
    """The kernel on operands as they lie in the layout: ``[R, C, H, D]`` -> ``[R, C, H, Dv]``."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layout.format == "bshd":
            return kernel(query, key, value, call)
        return kernel(query[0], key[0], value[0], call)[None]

    return attend


TOKENS, HIDDEN, VOCABULARY, FILLED_UP = 37, 64, 1500, 1536
"""The last ``FILLED_UP - VOCABULARY`` rows of the output layer belong to no token."""
TEMPERATURE = 0.7
IGNORED_EVERY = 5
LOG_PROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest error of values and gradients by dtype, as a part of the largest value or gradient."""


def log_probs(bench: Bench) -> dict[str, Any]:
    """Compute log-probs and entropies on the device; the result has the form of :func:`probe_attention`'s."""
    device, hooks = bench.runtime.current_device(), bench.session.hooks
    # More than one tile: 16 tokens' logits at a time, or 1024 entries of each.
    kernel = hooks.log_prob_kernel(LogProbSpec(VOCABULARY, 1, 16, bench.runtime.device_type, bench.dtype))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(bench.dtype)
    weight = (torch.randn(FILLED_UP, HIDDEN, generator=generator) * 0.3).to(bench.dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::IGNORED_EVERY] = -100
    exact = [operand.double().requires_grad_() for operand in (hidden, weight)]
    wanted = reference_log_probs(exact[0], exact[1], labels, entries=VOCABULARY, temperature=TEMPERATURE)
    leaves = [operand.to(device).requires_grad_() for operand in (hidden, weight)]
    found = kernel(leaves[0], leaves[1], labels.to(device), TEMPERATURE, None)
    difference = _difference([*wanted, *_gradients(wanted, exact)], [*found, *_gradients(found, leaves)])
    bench.runtime.synchronize()
    return {
        "difference": difference,
        "tolerance": LOG_PROB_TOLERANCE.get(bench.dtype, 0.05),
        "wrong": 0,
        "detail": f"{TOKENS} tokens, vocabulary of {VOCABULARY}, temperature {TEMPERATURE}, {bench.dtype}",
        "supplier": hooks.suppliers()["log_prob_kernel"],
        "mask_from": "",
    }


def _gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of something that weighs tokens differently, and both outputs."""
    log_probs, entropy = outputs
    if not log_probs.requires_grad or not entropy.requires_grad:
        return [None] * len(leaves)
    weights = torch.linspace(0.5, 1.5, len(log_probs), dtype=log_probs.dtype, device=log_probs.device)
    return list(torch.autograd.grad((weights * (log_probs + 0.3 * entropy)).sum(), leaves, allow_unused=True))


def _difference(wanted: list[Any], found: list[Any]) -> float:
    largest = 0.0
    for want, value in zip(wanted, found, strict=True):
        if value is None or not bool(value.isfinite().all()):
            return float("inf")
        gap = (value.detach().cpu().double() - want.detach()).abs().max() / want.detach().abs().max()
        largest = max(largest, float(gap))
    return largest


MOST_DEVICES = 16


def devices(bench: Bench) -> dict[str, Any]:
    """Return the number of devices that a process sees, and name and memory of each."""
    runtime = bench.runtime
    count, found = runtime.device_count(), []
    for index in range(min(count, MOST_DEVICES)):
        runtime.set_device(index)
        found.append({"name": runtime.device_name(), "total": runtime.memory_stats().total})
    if count:
        runtime.set_device(0)
    return {"count": count, "devices": found, "type": runtime.device_type}


def kernels(bench: Bench) -> dict[str, Any]:
    """Ask the plugins for every kernel, as the engine does, and return each kernel's supplier and description."""
    hooks, device = bench.session.hooks, bench.runtime.device_type
    errors: dict[str, str] = {}
    functions: dict[str, str] = {}

    def ask(label: str, hook: Any, *arguments: Any) -> None:
        try:
            kernel = hook(*arguments)
            while isinstance(kernel, partial):
                kernel = kernel.func
            named = kernel if hasattr(kernel, "__qualname__") else type(kernel)
            functions[label] = ".".join(filter(None, (named.__module__, named.__qualname__)))
        except Exception as error:  # noqa: BLE001 - a plugin's own code; the other kernels are asked for all the same
            errors[label] = f"{type(error).__name__}: {error}"

    ask("attention_kernel", hooks.attention_kernel, bench.attention())
    ask("log_prob_kernel", hooks.log_prob_kernel, LogProbSpec(32000, 1, 1024, device, bench.dtype))
    for name in KernelName:
        norm = {"eps": 1e-6, "zero_centered": False} if name.value.endswith("_norm") else {}
        ask(f"fused_kernel {name.value}", hooks.fused_kernel, name, KernelSpec(device, bench.dtype, norm))
    descriptions = hooks.kernel_descriptions()
    found = {
        kernel: {
            "supplier": plugin,
            "description": "; ".join(descriptions.get(kernel, ())),
            "function": functions.get(kernel, "").partition(".<locals>")[0],
        }
        for kernel, plugin in hooks.suppliers().items()
    }
    return {"kernels": found, "errors": errors}


def attention(bench: Bench, layer: str) -> dict[str, Any]:
    """Compute attention; ``layer`` is ``thd``, ``bshd``, ``thd window`` or ``bshd window`` (a sliding window)."""
    sequence_format, _, window = layer.partition(" ")
    return probe_attention(bench, "thd" if sequence_format == "thd" else "bshd", windowed=bool(window))


def executor(bench: Bench, name: str) -> dict[str, Any]:
    """Let an executor examine what it needs to start processes, if it offers such an examination."""
    found = load_component(EXECUTORS, name, "executor.kind")
    if not issubclass(found, ExaminedExecutor):
        return {"entries": []}
    return {"entries": [one.as_json() for one in found.examine(bench.run, bench.session.platform)]}


USUAL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""Attention that is probed if no model is known: grouped-query attention."""
WIDEST = 8
"""Largest number of query heads in a probe: all heads are alike, and more would add nothing."""
WINDOW = 3
"""Largest sliding window of a probe, in tokens: in its short sequences, the model's own would hide no token."""


@dataclass(frozen=True)
class Bench:
    """What the probes of a process share: its session, and the examined run.

    Attributes:
        session: The plugins and the platform.
        run: The run that is examined; None = no run, so that usual sizes are taken.
    """

    session: Session
    run: RunConfig | None

    @cached_property
    def runtime(self) -> DeviceRuntime:
        """The device runtime; loaded on first use."""
        runtime = self.session.platform.runtime()
        runtime.set_device(0)
        return runtime

    @cached_property
    def dtype(self) -> torch.dtype:
        """The element type of the run; without a run bfloat16, or float32 if the platform does not support bfloat16."""
        wanted = torch.bfloat16 if self.run is None else getattr(torch, self.run.model.dtype)
        assert isinstance(wanted, torch.dtype)
        usable = self.runtime.supports_dtype(wanted) and Feature.BFLOAT16 not in limits_of(self.session.platform)
        return wanted if self.run is not None or usable else torch.float32

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The Hugging Face config of the language model; :data:`USUAL` if no model is known."""
        if self.run is None:
            return USUAL
        try:
            fields = logits_fields(self.run.model.config or read_config(Path(self.run.model.path or "")))
        except ConfigError:  # topic configuration says so
            return USUAL
        found: Mapping[str, Any] = fields.get("text_config") or fields
        return found if found.get("num_attention_heads") else USUAL

    @cached_property
    def asked(self) -> Collection[Feature]:
        """The features that the model requires, as far as its config tells."""
        return () if self.run is None else asked_by_model(self.run)

    @property
    def traits(self) -> ModelTraits:
        """The model's traits, on which the mask depends."""
        latent, window = bool(self.model.get("kv_lora_rank")), None
        if Feature.SLIDING_WINDOW in self.asked:
            window = min(self.model.get("sliding_window") or WINDOW, WINDOW) - 1, 0
        return ModelTraits(causal=True, latent_attention=latent, window=window)

    @property
    def sizes(self) -> ParallelSizes:
        """Parallel sizes of a probe: one rank."""
        return ParallelSizes()

    def attention(self, *, windowed: bool = False) -> AttentionSpec:
        """Return the model's attention on one rank, with no more heads than a probe needs.

        Args:
            windowed: Whether to return the attention of a layer with a sliding window, if the model has such layers.
        """
        model, tensor = self.model, 1 if self.run is None else self.run.parallel.tensor_model_parallel_size
        heads = max(1, model["num_attention_heads"] // tensor)
        groups = max(1, (model.get("num_key_value_heads") or model["num_attention_heads"]) // tensor)
        if model.get("kv_lora_rank"):
            qk, value, groups = model["qk_nope_head_dim"] + model["qk_rope_head_dim"], model["v_head_dim"], heads
        else:
            qk = value = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        if heads > WIDEST and heads % groups == 0:
            ratio = min(heads // groups, WIDEST)
            groups = max(1, min(groups, WIDEST // ratio))
            heads = groups * ratio
        return AttentionSpec(
            heads,
            groups,
            qk,
            value,
            qk**-0.5,
            self.traits if windowed else replace(self.traits, window=None),
            sinks=Feature.ATTENTION_SINKS in self.asked,
            device_type=self.runtime.device_type,
        )
