"""Log-prob and fused kernels that are wrong in one way each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import distributed
from torch.nn import functional

from anytron.kernels import fused
from anytron.kernels.contract import KernelName
from anytron.kernels.log_prob import make_log_prob
from tests.conformance.kernel_mutant import KernelMutant


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


class ForgetsTheTemperature(KernelMutant):
    rule, says = "log-probs-temperature", "The log-prob is wrong"
    log_probs = kernel(lambda spec, hidden, weight, labels, _temperature: plain_log_probs(hidden, weight, labels, 1.0))


class EntropyWithoutTemperature(KernelMutant):
    rule, says = "log-probs-temperature", "The entropy is wrong"
    log_probs = kernel(
        lambda spec, hidden, weight, labels, temperature: plain_log_probs(
            hidden, weight, labels, temperature, entropy_temperature=1.0
        )
    )


class EntropyDoesNotLearn(KernelMutant):
    rule, says = "log-probs-gradients", "The entropy has no gradient"

    @staticmethod
    def score(spec, hidden, weight, labels, temperature):
        chosen, entropy = plain_log_probs(hidden, weight, labels, temperature)
        return chosen, entropy.detach()

    log_probs = kernel(score.__func__)


class OutputLayerDoesNotLearn(KernelMutant):
    rule, says = "log-probs", "The gradient of the output layer's weight is missing"
    log_probs = kernel(
        lambda spec, hidden, weight, labels, temperature: plain_log_probs(hidden, weight.detach(), labels, temperature)
    )


class ScoresIgnoredLabels(KernelMutant):
    rule, says = "log-probs-ignored-labels", "The log-prob is wrong"

    def log_probs(self, spec):
        return lambda hidden, weight, labels, temperature, group: plain_log_probs(
            hidden, weight[: spec.vocab_size], labels, temperature
        )


class PaddingHasProbability(KernelMutant):
    rule, says = "log-probs-vocabulary-padding", "The log-prob is wrong"

    def log_probs(self, spec):
        def scored(hidden, weight, labels, temperature, group):
            results = plain_log_probs(hidden, weight, labels, temperature)
            return tuple(one.masked_fill(labels < 0, 0.0) for one in results)

        return scored


class DropsTheLastOfAChunk(KernelMutant):
    rule, says = "log-probs-chunks", "The log-prob is wrong"

    @staticmethod
    def score(spec, hidden, weight, labels, temperature):
        chosen, entropy = plain_log_probs(hidden, weight, labels, temperature)
        at_a_border = (labels % 1024 == 1023) & (len(labels) > spec.chunk_tokens)
        return torch.where(at_a_border, chosen * 0, chosen), entropy

    log_probs = kernel(score.__func__)


class Overflows(KernelMutant):
    rule, says = "log-probs-large-logits", "The log-prob is wrong"
    log_probs = kernel(
        lambda spec, hidden, weight, labels, temperature: plain_log_probs(
            hidden, weight, labels, temperature, peak=False
        )
    )


class AnswersInTheOperandsType(KernelMutant):
    rule, says = "log-probs", "The log-prob has the wrong dtype"

    @staticmethod
    def score(spec, hidden, weight, labels, temperature):
        return [one.to(hidden.dtype) for one in plain_log_probs(hidden, weight, labels, temperature)]

    log_probs = kernel(score.__func__)


class IgnoresStridesOfHidden(KernelMutant):
    rule, says = "log-probs-strides", "it is nan"

    def log_probs(self, spec):
        score = make_log_prob(spec)

        def scored(hidden, *others):
            return score(hidden.as_strided(hidden.shape, (hidden.shape[1], 1)), *others)

        return scored


class SharesOneTile(KernelMutant):
    """Keeps the last call's hidden states for the backward pass."""

    rule, says = "kernel-calls", "invalid gradient"

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


class SumsTheGradientItself(KernelMutant):
    """Adds up the gradient of the hidden states over the ranks, as the layer does afterwards."""

    rule, says = "log-probs-tensor-parallel", "The gradient of the hidden states, summed over the ranks"

    def log_probs(self, spec):
        score = make_log_prob(spec)

        def scored(hidden, weight, labels, temperature, group):
            if spec.tensor_parallel > 1:
                hidden = Summed.apply(hidden, group)
            return score(hidden, weight, labels, temperature, group)

        return scored


class Summed(torch.autograd.Function):
    """Adds up a gradient over a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class TakesItsRowsForAll(KernelMutant):
    """Normalises over this rank's rows alone."""

    rule, says = "log-probs-tensor-parallel", "The log-prob is wrong"

    def log_probs(self, spec):
        score = make_log_prob(replace(spec, tensor_parallel=1))

        def scored(hidden, weight, labels, temperature, group):
            if spec.tensor_parallel > 1:
                labels = labels.where(labels < 0, labels % len(weight))
            return score(hidden, weight, labels, temperature, None)

        return scored


def replacing(name, function):
    """Make ``fused`` of a platform: one kernel."""
    return lambda self, asked: function if asked is name else None


class AddsNoBias(KernelMutant):
    rule, says = "linear", "The output is wrong"
    fused = replacing(KernelName.LINEAR, lambda x, weight, bias: fused.linear(x, weight, None))


class IgnoresEps(KernelMutant):
    rule, says = "rms-norm", "The output is wrong"
    fused = replacing(
        KernelName.RMS_NORM, lambda x, weight, eps, zero_centered: fused.rms_norm(x, weight, 1e-6, zero_centered)
    )


class IgnoresZeroCentered(KernelMutant):
    rule, says = "rms-norm", "The output is wrong"
    fused = replacing(KernelName.RMS_NORM, lambda x, weight, eps, zero_centered: fused.rms_norm(x, weight, eps, False))


class Doubled(torch.autograd.Function):
    """Doubles a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class DoublesTheGradient(KernelMutant):
    rule, says = "rms-norm", "The gradient of the input is wrong"
    fused = replacing(
        KernelName.RMS_NORM,
        lambda x, weight, eps, zero_centered: fused.rms_norm(Doubled.apply(x), weight, eps, zero_centered),
    )


class NormsMatricesOnly(KernelMutant):
    rule, says = "rms-norm", "view size is not compatible"
    fused = replacing(
        KernelName.RMS_NORM,
        lambda x, weight, eps, zero_centered: fused.rms_norm(x.view(-1, x.shape[-1]), weight, eps, zero_centered).view(
            x.shape
        ),
    )


class BiasDoesNotLearn(KernelMutant):
    rule, says = "layer-norm", "The gradient of the bias is missing"
    fused = replacing(
        KernelName.LAYER_NORM,
        lambda x, weight, bias, eps, zero_centered: fused.layer_norm(
            x, weight, None if bias is None else bias.detach(), eps, zero_centered
        ),
    )


class SwapsTheHalves(KernelMutant):
    rule, says = "swiglu", "The output is wrong"
    fused = replacing(KernelName.SWIGLU, lambda x: fused.swiglu(torch.cat(x.chunk(2, -1)[::-1], -1)))


class IgnoresInterleaving(KernelMutant):
    rule, says = "rope", "The output is wrong"
    fused = replacing(KernelName.ROPE, lambda x, freqs, interleaved: fused.rope(x, freqs, False))


class DropsTheRest(KernelMutant):
    rule, says = "rope", "The output is wrong"
    fused = replacing(
        KernelName.ROPE,
        lambda x, freqs, interleaved: functional.pad(
            fused.rope(x[..., : freqs.shape[-1]], freqs, interleaved), (0, x.shape[-1] - freqs.shape[-1])
        ),
    )


class TurnsGradientsForward(KernelMutant):
    rule, says = "rope", "The gradient of the input is wrong"

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, freqs, interleaved):
            ctx.freqs, ctx.interleaved = freqs, interleaved
            return fused.rope(x, freqs, interleaved)

        @staticmethod
        def backward(ctx, grad):
            return fused.rope(grad, ctx.freqs, ctx.interleaved), None, None

    fused = replacing(KernelName.ROPE, Turned.apply)


class EmptyGroupsHaveNoGradient(KernelMutant):
    rule, says = "grouped-mm", "The gradient of the weight of group 1 is missing"

    @staticmethod
    def multiply(x, weights, splits):
        parts = zip(torch.split(x, list(splits)), weights, strict=True)
        found = [part @ weight.T for part, weight in parts if len(part)]
        return torch.cat(found) if found else x @ weights[0].T

    fused = replacing(KernelName.GROUPED_MM, multiply.__func__)


class ConvolvesNeighbours(KernelMutant):
    rule, says = "causal-conv1d", "The output is wrong"
    fused = replacing(
        KernelName.CAUSAL_CONV1D,
        lambda x, weight, bias, silu, cu_seqlens: fused.causal_conv1d(x, weight, bias, silu, None),
    )


class CarriesTheStateOver(KernelMutant):
    rule, says = "gated-delta-rule", "The output is wrong"
    fused = replacing(
        KernelName.GATED_DELTA_RULE,
        lambda q, k, v, g, beta, scale, cu_seqlens: fused.gated_delta_rule(q, k, v, g, beta, scale, None),
    )


class DecayDoesNotLearn(KernelMutant):
    rule, says = "gated-delta-rule", "The gradient of the decay is missing"
    fused = replacing(
        KernelName.GATED_DELTA_RULE,
        lambda q, k, v, g, beta, scale, cu_seqlens: fused.gated_delta_rule(
            q, k, v, g.detach(), beta, scale, cu_seqlens
        ),
    )


class ScansNeighbours(KernelMutant):
    rule, says = "state-space-scan", "The output is wrong"
    fused = replacing(
        KernelName.STATE_SPACE_SCAN,
        lambda x, dt, a, b, c, d, cu_seqlens: fused.state_space_scan(x, dt, a, b, c, d, None),
    )


class RateDoesNotLearn(KernelMutant):
    rule, says = "state-space-scan", "The gradient of the rate of the decay is missing"
    fused = replacing(
        KernelName.STATE_SPACE_SCAN,
        lambda x, dt, a, b, c, d, cu_seqlens: fused.state_space_scan(x, dt, a.detach(), b, c, d, cu_seqlens),
    )


class DecaysOnlyDecoupled(KernelMutant):
    rule, says = "adam", "The parameter"
    fused = replacing(KernelName.ADAM, lambda *tensors, **form: fused.adam(*tensors, **{**form, "decoupled": True}))


class AlwaysCorrectsTheBias(KernelMutant):
    rule, says = "adam", "The parameter"
    fused = replacing(
        KernelName.ADAM, lambda *tensors, **form: fused.adam(*tensors, **{**form, "bias_correction": True})
    )
