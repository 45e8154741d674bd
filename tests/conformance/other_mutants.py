"""Log-prob and fused kernels that are wrong in one way each."""

from __future__ import annotations

import torch
from torch.nn import functional

from anytron.kernels import fused
from anytron.kernels.contract import KernelName
from anytron.kernels.log_prob import make_log_prob
from tests.conformance.broken import BrokenPlatform


def plain_log_probs(hidden, weight, labels, temperature, *, entropy_temperature=None, peak=True):
    """Log-probs and entropies from all logits at once."""
    logits = (hidden @ weight.T).float()
    scaled = logits / temperature
    of_entropy = logits / (entropy_temperature or temperature)
    every = scaled.log_softmax(-1) if peak else scaled - scaled.exp().sum(-1, keepdim=True).log()
    others = of_entropy.log_softmax(-1)
    entropy = -(others.exp() * others).sum(-1)
    return every.gather(-1, labels.clamp(min=0)[:, None])[:, 0], entropy


def kernel(score):
    """Make ``log_probs`` of a platform, from a function of (spec, hidden, weight, labels, temperature)."""

    def log_probs(self, spec):
        def scored(hidden, weight, labels, temperature, group):
            results = score(spec, hidden, weight[: spec.vocab_size], labels, temperature)
            return tuple(one.masked_fill(labels < 0, 0.0) for one in results)

        return scored if spec.tensor_parallel == 1 else None

    return log_probs


class ForgetsTheTemperature(BrokenPlatform):
    rule = "log-probs-temperature"
    log_probs = kernel(lambda spec, hidden, weight, labels, _temperature: plain_log_probs(hidden, weight, labels, 1.0))


class EntropyWithoutTemperature(BrokenPlatform):
    rule = "log-probs-temperature"
    log_probs = kernel(
        lambda spec, hidden, weight, labels, temperature: plain_log_probs(
            hidden, weight, labels, temperature, entropy_temperature=1.0
        )
    )


class EntropyDoesNotLearn(BrokenPlatform):
    rule = "log-probs-gradients"

    @staticmethod
    def score(spec, hidden, weight, labels, temperature):
        chosen, entropy = plain_log_probs(hidden, weight, labels, temperature)
        return chosen, entropy.detach()

    log_probs = kernel(score.__func__)


class OutputLayerDoesNotLearn(BrokenPlatform):
    rule = "log-probs"
    log_probs = kernel(
        lambda spec, hidden, weight, labels, temperature: plain_log_probs(hidden, weight.detach(), labels, temperature)
    )


class ScoresIgnoredLabels(BrokenPlatform):
    rule = "log-probs-ignored-labels"

    def log_probs(self, spec):
        return lambda hidden, weight, labels, temperature, group: plain_log_probs(
            hidden, weight[: spec.vocab_size], labels, temperature
        )


class PaddingHasProbability(BrokenPlatform):
    rule = "log-probs-vocabulary-padding"

    def log_probs(self, spec):
        def scored(hidden, weight, labels, temperature, group):
            results = plain_log_probs(hidden, weight, labels, temperature)
            return tuple(one.masked_fill(labels < 0, 0.0) for one in results)

        return scored


class DropsTheLastOfAChunk(BrokenPlatform):
    rule = "log-probs-chunks"

    @staticmethod
    def score(spec, hidden, weight, labels, temperature):
        chosen, entropy = plain_log_probs(hidden, weight, labels, temperature)
        at_a_border = (labels % 1024 == 1023) & (len(labels) > spec.chunk_tokens)
        return torch.where(at_a_border, chosen * 0, chosen), entropy

    log_probs = kernel(score.__func__)


class Overflows(BrokenPlatform):
    rule = "log-probs-large-logits"
    log_probs = kernel(
        lambda spec, hidden, weight, labels, temperature: plain_log_probs(
            hidden, weight, labels, temperature, peak=False
        )
    )


class AnswersInTheOperandsType(BrokenPlatform):
    rule = "log-probs"

    @staticmethod
    def score(spec, hidden, weight, labels, temperature):
        return [one.to(hidden.dtype) for one in plain_log_probs(hidden, weight, labels, temperature)]

    log_probs = kernel(score.__func__)


class IgnoresStrides(BrokenPlatform):
    rule = "log-probs-strides"

    def log_probs(self, spec):
        score = make_log_prob(spec)

        def scored(hidden, *others):
            return score(hidden.as_strided(hidden.shape, (hidden.shape[1], 1)), *others)

        return scored


class SharesOneTile(BrokenPlatform):
    """Keeps the last call's hidden states for the backward pass."""

    rule = "kernel-calls"

    def log_probs(self, spec):
        last = []

        class Scored(torch.autograd.Function):
            @staticmethod
            def forward(ctx, hidden, weight, labels, temperature, group):
                last[:] = [hidden, weight, labels, temperature, group]
                return make_log_prob(spec)(hidden, weight, labels, temperature, group)

            @staticmethod
            def backward(ctx, *incoming):
                hidden, weight, *others = last
                leaves = [one.detach().requires_grad_() for one in (hidden, weight)]
                with torch.enable_grad():
                    results = make_log_prob(spec)(*leaves, *others)
                rows = len(hidden)
                grads = torch.autograd.grad(
                    results, leaves, [functional.pad(one, (0, max(0, rows - len(one))))[:rows] for one in incoming]
                )
                return (*grads, None, None, None)

        return Scored.apply


def replacing(name, function):
    """Make ``fused`` of a platform: one kernel."""
    return lambda self, asked: function if asked is name else None


class IgnoresEps(BrokenPlatform):
    rule = "rms-norm"
    fused = replacing(
        KernelName.RMS_NORM, lambda x, weight, eps, zero_centered: fused.rms_norm(x, weight, 1e-6, zero_centered)
    )


class IgnoresZeroCentered(BrokenPlatform):
    rule = "rms-norm"
    fused = replacing(KernelName.RMS_NORM, lambda x, weight, eps, zero_centered: fused.rms_norm(x, weight, eps, False))


class Doubled(torch.autograd.Function):
    """Doubles a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class DoublesTheGradient(BrokenPlatform):
    rule = "rms-norm"
    fused = replacing(
        KernelName.RMS_NORM,
        lambda x, weight, eps, zero_centered: fused.rms_norm(Doubled.apply(x), weight, eps, zero_centered),
    )


class NormsMatricesOnly(BrokenPlatform):
    rule = "rms-norm"
    fused = replacing(
        KernelName.RMS_NORM,
        lambda x, weight, eps, zero_centered: fused.rms_norm(x.view(-1, x.shape[-1]), weight, eps, zero_centered).view(
            x.shape
        ),
    )


class BiasDoesNotLearn(BrokenPlatform):
    rule = "layer-norm"
    fused = replacing(
        KernelName.LAYER_NORM,
        lambda x, weight, bias, eps, zero_centered: fused.layer_norm(
            x, weight, None if bias is None else bias.detach(), eps, zero_centered
        ),
    )


class SwapsTheHalves(BrokenPlatform):
    rule = "swiglu"
    fused = replacing(KernelName.SWIGLU, lambda x: fused.swiglu(torch.cat(x.chunk(2, -1)[::-1], -1)))


class IgnoresInterleaving(BrokenPlatform):
    rule = "rope"
    fused = replacing(KernelName.ROPE, lambda x, freqs, interleaved: fused.rope(x, freqs, False))


class DropsTheRest(BrokenPlatform):
    rule = "rope"
    fused = replacing(
        KernelName.ROPE,
        lambda x, freqs, interleaved: functional.pad(
            fused.rope(x[..., : freqs.shape[-1]], freqs, interleaved), (0, x.shape[-1] - freqs.shape[-1])
        ),
    )


class TurnsGradientsForward(BrokenPlatform):
    rule = "rope"

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, freqs, interleaved):
            ctx.freqs, ctx.interleaved = freqs, interleaved
            return fused.rope(x, freqs, interleaved)

        @staticmethod
        def backward(ctx, grad):
            return fused.rope(grad, ctx.freqs, ctx.interleaved), None, None

    fused = replacing(KernelName.ROPE, Turned.apply)


class EmptyGroupsHaveNoGradient(BrokenPlatform):
    rule = "grouped-mm"

    @staticmethod
    def multiply(x, weights, splits):
        parts = zip(torch.split(x, list(splits)), weights, strict=True)
        found = [part @ weight.T for part, weight in parts if len(part)]
        return torch.cat(found) if found else x @ weights[0].T

    fused = replacing(KernelName.GROUPED_MM, multiply.__func__)


class ConvolvesNeighbours(BrokenPlatform):
    rule = "causal-conv1d"
    fused = replacing(
        KernelName.CAUSAL_CONV1D,
        lambda x, weight, bias, silu, cu_seqlens: fused.causal_conv1d(x, weight, bias, silu, None),
    )


class CarriesTheStateOver(BrokenPlatform):
    rule = "gated-delta-rule"
    fused = replacing(
        KernelName.GATED_DELTA_RULE,
        lambda q, k, v, g, beta, scale, cu_seqlens: fused.gated_delta_rule(q, k, v, g, beta, scale, None),
    )


class DecayDoesNotLearn(BrokenPlatform):
    rule = "gated-delta-rule"
    fused = replacing(
        KernelName.GATED_DELTA_RULE,
        lambda q, k, v, g, beta, scale, cu_seqlens: fused.gated_delta_rule(
            q, k, v, g.detach(), beta, scale, cu_seqlens
        ),
    )


class DecaysOnlyDecoupled(BrokenPlatform):
    rule = "adam"
    fused = replacing(KernelName.ADAM, lambda *tensors, **form: fused.adam(*tensors, **{**form, "decoupled": True}))


class AlwaysCorrectsTheBias(BrokenPlatform):
    rule = "adam"
    fused = replacing(
        KernelName.ADAM, lambda *tensors, **form: fused.adam(*tensors, **{**form, "bias_correction": True})
    )
