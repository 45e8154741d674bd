"""Weights and settings of a checkpoint that a bridge drops, exchanges or reads otherwise."""

from __future__ import annotations

import functools
import json

from torch.nn import functional

from anytron import hookimpl
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import rms_norm
from tests.corpus.fault import Fault, in_place_of

EXPORT = "anytron_megatron.models.bridge:BridgeSource.export"
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


class LogitSoftcapMissingInOneVariant(Fault):
    """The head computes log-probs of logits that are not limited."""

    run, rule = "gemma", "hf-log-probs"

    @staticmethod
    @in_place_of("anytron_megatron.building:take_cap")
    def without(original, model):
        original(model)


class ActivationNamedByALegacyField(Fault):
    """The layers of a model with the approximation of GELU by a tanh get the exact function."""

    run, rule = "gemma", "hf-logits"

    @staticmethod
    @in_place_of("anytron_megatron.models.bridge:completed")
    def exact(original, converted):
        return {**original(converted), "activation_func": functional.gelu}


class ExportChangesTheLiveWeights(Fault):
    """Each export adds one to the zero-centred norms of the model that is trained."""

    run, rule = "delta-net", "hf-logits"

    @staticmethod
    @in_place_of(EXPORT)
    def in_place(original, source, chunks, **named):
        for name, tensor in original(source, chunks, **named):
            yield name, tensor.clone()
        for _, value in parameters(chunks, ("layernorm.weight", "layer_norm_weight")):
            value.data.add_(1)


class SquareExpertWeightTransposedTwice(Fault):
    """Import and export both transpose the experts' second matrix, which is square."""

    run, rule = "moe", "hf-logits"

    @staticmethod
    @in_place_of(LOAD)
    def transposed(original, bridge, chunks, *arguments):
        original(bridge, chunks, *arguments)
        for name, value in (pair for chunk in chunks for pair in chunk.named_parameters()):
            if ".experts." in name and "linear_fc2" in name:
                value.data.copy_(value.data.mT.clone())

    @staticmethod
    @in_place_of(EXPORT)
    def again(original, source, chunks, **named):
        for name, tensor in original(source, chunks, **named):
            square = ".experts." in name and name.endswith("down_proj.weight")
            yield name, tensor.mT.contiguous() if square else tensor


class FieldReplacedByTheDefaultAtExport(Fault):
    """The saved configuration lacks the width of the window."""

    run, rule, changes_a_run = "window", "saved-model", False

    @staticmethod
    @in_place_of("anytron_megatron.models.bridge:save_hf_config")
    def dropping(original, hf_config, origin, directory):
        original(hf_config, origin, directory)
        file = directory / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({name: fields[name] for name in fields if name != "sliding_window"}))
