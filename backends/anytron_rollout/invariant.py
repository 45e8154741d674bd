"""A Hugging Face model whose rows do not depend on their company, so that its log-probs are training's to the bit.

Its linear layers and its attention compute with the platform's company-invariant kernels, and log-probs come from the
kernel that training uses. Batches have prompts of one length: padding on the left would move a sequence's first key.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from anytron.base.errors import EngineError
from anytron.base.traits import ModelTraits
from anytron.kernels.contract import AttentionCall, AttentionSpec, KernelName, KernelSpec, LogProbSpec
from anytron.kernels.fused import default_kernel
from anytron.kernels.invariant import silu
from anytron_rollout.invariant_experts import ACTIVATIONS, rebind_experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.kernels.contract import AttentionKernel, KernelSource

ATTENTION = "anytron-invariant"
"""Name for transformers' ``attn_implementation``."""

_KERNEL = "_anytron_attention"


def offer_attention() -> None:
    """Let transformers' models be built with ``attn_implementation=ATTENTION``."""
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class InvariantModel:
    """Makes a model compute with company-invariant kernels, and scores the tokens that it drew.

    Args:
        model: A ``transformers.PreTrainedModel`` that was built with ``attn_implementation=ATTENTION``.
        kernels: Source of company-invariant kernels.
        device_type: ``torch.device`` type of the model.
        chunk_tokens: As :attr:`anytron.kernels.contract.LogProbSpec.chunk_tokens`.

    Raises:
        EngineError: The platform has another kernel where transformers' formula stays, or experts are of a form that
            is not known.
    """

    def __init__(self, model: Any, kernels: KernelSource, device_type: str, chunk_tokens: int) -> None:
        self._head = model.get_output_embeddings()
        self._hidden: Tensor | None = None
        dtype = self._head.weight.dtype
        spec = KernelSpec(device_type, dtype)
        _require_default(kernels, spec)
        linear = kernels.fused_kernel(KernelName.LINEAR, spec)
        attention = partial(_attention_kernel, kernels, device_type)
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not self._head:
                vars(module)["forward"] = partial(_multiply, linear, module)
            if isinstance(module, ACTIVATIONS):
                vars(module)["forward"] = silu
            vars(module)[_KERNEL] = attention
        rebind_experts(model, kernels, device_type)
        entries = self._head.weight.shape[0]
        self._kernel = kernels.log_prob_kernel(LogProbSpec(entries, 1, chunk_tokens, device_type, dtype))
        self._head.register_forward_pre_hook(self._remember)

    def score(self, tokens: Tensor, temperature: float) -> Tensor:
        """Return the log-probs, float32 ``[B]``, of the tokens, int64 ``[B]``, drawn after the model's last pass."""
        assert self._hidden is not None
        return self._kernel(self._hidden, self._head.weight, tokens, temperature, None)[0]

    def _remember(self, _head: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._hidden = arguments[0][:, -1]


def _require_default(kernels: KernelSource, spec: KernelSpec) -> None:
    """Raise :class:`EngineError` if training has a kernel of the platform where the rollout keeps its own formula."""
    norm = replace(spec, options={"eps": 1e-6, "zero_centered": False})
    for name, one in ((KernelName.RMS_NORM, norm), (KernelName.SWIGLU, spec), (KernelName.ROPE, spec)):
        if kernels.fused_kernel(name, one) is not default_kernel(name, replace(one, invariant=True)):
            raise EngineError(
                f"The platform computes {name.value} with a kernel that transformers does not call.",
                where="engine.on_policy=bitwise with rollout.engine=transformers",
                why="training would use that kernel, and the rollout transformers' formula, whose bits may differ",
                fix="set rollout.engine=megatron, or engine.on_policy=close",
            )


def _multiply(linear: Callable[..., Tensor], module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _attention_kernel(
    kernels: KernelSource, device_type: str, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> AttentionKernel:
    sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    return kernels.attention_kernel(AttentionSpec(*sizes, scale, ModelTraits(), device_type=device_type))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_settings: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa_attention_forward`` does, with the kernel of the platform.

    Shapes: queries ``[B, H, S, D]``, keys and values ``[B, G, L, D]``, the mask bool ``[B, 1, S, L]``, True = KEEP.

    Returns:
        ``[B, S, H, D]``, and None for the weights.
    """
    found = vars(module)[_KERNEL]
    if isinstance(found, partial):
        found = vars(module)[_KERNEL] = found(
            query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling
        )
    if attention_mask is not None:
        call = AttentionCall("bshd", "arbitrary", mask=~attention_mask)
    else:
        call = AttentionCall("bshd", "causal" if query.shape[2] > 1 else "no_mask")
    return found(*(part.transpose(1, 2) for part in (query, key, value)), call), None
