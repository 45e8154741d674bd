"""Weights and settings of a checkpoint that a bridge drops, exchanges or reads otherwise."""

from __future__ import annotations

import functools

from anytron import hookimpl
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import rms_norm
from tests.corpus.fault import Fault, in_place_of

LOAD = "anytron_megatron.models.bridge:load_weights"


def parameters(chunks, ending):
    """Yield the parameters and buffers of chunks whose names end in ``ending``."""
    for chunk in chunks:
        for name, value in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name.endswith(ending):
                yield name, value


class ValueScaleForgotten(Fault):
    """The scale that a configuration has for the values is not applied."""

    run, rule = "qwen3", "hf-logits"

    @hookimpl
    def attention_kernel(self, spec):
        attend = make_attention(spec)
        return lambda query, key, value, call: attend(query, key, value / 0.707, call)


class TwoNormsFromOneTensor(Fault):
    """The norm before the second part of a layer is filled from the tensor of another norm."""

    run, rule, changes_a_run = "four-norms", "export-equals-import", False  # a run begins with norms of ones

    @staticmethod
    @in_place_of(LOAD)
    def fill(original, bridge, chunks, *arguments):
        original(bridge, chunks, *arguments)
        others = dict(parameters(chunks, "post_self_attn_layernorm.weight"))
        before = dict(parameters(chunks, "mlp.linear_fc1.layer_norm_weight")) or dict(
            parameters(chunks, "pre_mlp_layernorm.weight")
        )
        for value, other in zip(before.values(), others.values(), strict=True):
            value.data.copy_(other)


class RouterCorrectionBiasNotMapped(Fault):
    """The bias by which experts are chosen stays zero."""

    run, rule = "mtp", "export-equals-import"

    @staticmethod
    @in_place_of(LOAD)
    def without(original, bridge, chunks, *arguments):
        original(bridge, chunks, *arguments)
        for _, value in parameters(chunks, "expert_bias"):
            value.data.zero_()


class EpsilonOfTheConfigNotPassed(Fault):
    """Norms add 1e-5 where the configuration says 1e-6."""

    run, rule = "qwen3", "hf-logits"

    @hookimpl
    def fused_kernel(self, name, spec):
        return functools.partial(with_another_epsilon) if name is KernelName.RMS_NORM else None


def with_another_epsilon(x, weight, eps, zero_centered):
    return rms_norm(x, weight, 1e-5, zero_centered)
