"""Platforms that only a whole engine shows to be broken: wrong in values, in gradients, between ranks, over updates."""

from __future__ import annotations

import functools
import itertools

import torch

from anytron import hookimpl
from anytron.device.patches import Patch, Phase
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import adam, default_kernel, grouped_mm
from anytron.kernels.log_prob import make_log_prob
from anytron_cpu.runtime import CpuRuntime
from tests.conformance.mutant import Mutant


class Scaled(torch.autograd.Function):
    """The same values, and another gradient."""

    @staticmethod
    def forward(ctx, values, factor):
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class PatchingMutant(Mutant):
    """Replaces a function of a library in the training ranks."""

    target, replacement = "", ""

    @hookimpl
    def patch_model(self, phase, context):
        if phase is not Phase.BEFORE_BUILD or context.role != "trainer":
            return []
        names = {"id": self.name, "owner": self.name, "phase": phase, "target": self.target}
        return [Patch(**names, reason="a test", replacement=f"{__name__}:{self.replacement}")]


class LogProbMutant(Mutant):
    """Has a log-prob kernel of its own."""

    def log_prob(self, kernel, hidden, weight, labels, temperature, group):
        raise NotImplementedError

    @hookimpl
    def log_prob_kernel(self, spec):
        return functools.partial(self.log_prob, make_log_prob(spec))


class AttentionMutant(Mutant):
    """Has an attention kernel of its own."""

    def attend(self, attention, query, key, value, call):
        raise NotImplementedError

    @hookimpl
    def attention_kernel(self, spec):
        return functools.partial(self.attend, make_attention(spec))


class LargerAttention(AttentionMutant):
    rule, says = "model-logits", "Qwen3, one rank"

    def attend(self, attention, query, key, value, call):
        return 1.01 * attention(query, key, value, call)


class OtherEntropy(LogProbMutant):
    rule, says = "model-log-probs", "entropies"

    def log_prob(self, kernel, hidden, weight, labels, temperature, group):
        log_probs, entropy = kernel(hidden, weight, labels, temperature, group)
        return log_probs, 1.04 * entropy


class DoubledNormGradient(Mutant):
    rule, says = "model-gradients", "norm"

    @hookimpl
    def fused_kernel(self, name, spec):
        if name is not KernelName.RMS_NORM:
            return None
        kernel = default_kernel(name, spec)
        return lambda x, *arguments: Scaled.apply(kernel(x, *arguments), 2.0)


class DetachedOutput(Mutant):
    rule, says = "model-gradients", "no gradient reaches any parameter: look at postprocess_output"

    @hookimpl
    def postprocess_output(self, values, layout):
        flat = layout.unpack(values)
        return flat.detach() + 0.0 * flat


class NoWeightGradient(LogProbMutant):
    rule, says = "model-gradients", "lm_head.weight"

    def log_prob(self, kernel, hidden, weight, labels, temperature, group):
        return kernel(hidden, weight.detach(), labels, temperature, group)


class WrongRows(AttentionMutant):
    rule, says = "packed-equals-padded", "log_probs at 1"

    def attend(self, attention, query, key, value, call):
        out = attention(query, key, value, call)
        return 1.01 * out if call.format == "bshd" else out


class AveragesSums(PatchingMutant):
    rule, says = "tensor-parallel", "TP2"
    target, replacement = "torch.distributed:all_reduce", "averaging"


def averaging(original):
    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        work = original(tensor, op=op, group=group, async_op=async_op)
        if op == torch.distributed.ReduceOp.SUM and tensor.is_floating_point():
            tensor /= torch.distributed.get_world_size(group)
        return work

    return all_reduce


class RoundedActivations(PatchingMutant):
    rule, says = "pipeline-parallel", "PP2"
    target = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.recv_forward"
    replacement = "rounded"


def rounded(original):
    def recv_forward(self, *arguments, **named):
        received = original(self, *arguments, **named)
        return [each if each is None else each.detach().half().float().requires_grad_() for each in received]

    return recv_forward


class RoundedPieces(PatchingMutant):
    """Rounds what only an interleaved schedule sends."""

    rule, says = "pipeline-parallel", "PP2 x VPP2"
    target = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.send_forward_recv_forward"
    replacement = "rounded"


class RoundedTokens(PatchingMutant):
    rule, says = "expert-parallel", "EP2"
    target, replacement = "torch.distributed:all_to_all_single", "rounding"


def rounding(original):
    def all_to_all_single(output, *arguments, **named):
        work = original(output, *arguments, **named)
        if output.is_floating_point():
            output.copy_(output.half())
        return work

    return all_to_all_single


class OwnExperts(PatchingMutant):
    """Routers of its own, which know nothing of replay."""

    rule, says = "router-replay", "Log-probs differ from transformers' with the given experts"
    target = "megatron.core.transformer.moe.router:TopKRouter.routing"
    replacement = "own_experts"


def own_experts(original):
    def routing(self, *arguments, **named):
        replay, self.router_replay = self.router_replay, None
        try:
            return original(self, *arguments, **named)
        finally:
            self.router_replay = replay

    return routing


class EqualWeights(PatchingMutant):
    """Weighs the experts that are replayed without a gradient."""

    rule, says = "router-replay", "Gradients differ from transformers' with the given experts"
    target = "megatron.core.transformer.moe.router:TopKRouter.routing"
    replacement = "without_gradient"


def without_gradient(original):
    def routing(self, *arguments, **named):
        probs, chosen = original(self, *arguments, **named)
        return (probs if self.router_replay is None else probs.detach().requires_grad_()), chosen

    return routing


class CutAdapters(PatchingMutant):
    """Linear layers whose adapters give no gradient to their inputs."""

    rule, says = "adapters", "Gradients of adapters differ from transformers'"
    target, replacement = "mcore_bridge.tuners.lora:LoraParallelLinear.update_layer", "cut"


def cut(original):
    class Cut(torch.nn.Module):
        def forward(self, values):
            return values.detach()

    def update_layer(self, adapter_name, *arguments, **named):
        original(self, adapter_name, *arguments, **named)
        self.lora_dropout[adapter_name] = Cut()

    return update_layer


class ForgottenAdapters(PatchingMutant):
    """Linear layers that leave their adapters out when nobody asks for gradients."""

    rule, says = "adapters", "log-probs differ from the merged model's"
    target, replacement = "mcore_bridge.tuners.lora:LoraParallelLinear.forward", "forgetting"


def forgetting(original):
    def forward(self, x, *arguments, **named):
        scaling = dict(self.scaling)
        if not torch.is_grad_enabled():
            self.scaling.update(dict.fromkeys(scaling, 0.0))
        try:
            return original(self, x, *arguments, **named)
        finally:
            self.scaling.update(scaling)

    return forward


class NegativeValues(Mutant):
    """Takes every output for a log-prob."""

    rule, says = "critic", "Values differ from the value head times transformers' hidden states"

    @hookimpl
    def postprocess_output(self, values, layout):
        flat = layout.unpack(values)
        return torch.cat([flat[..., :1].clamp(max=0.0), flat[..., 1:]], -1)


class UntaughtCritic(Mutant):
    """Gives only log-probs and entropies a gradient."""

    rule, says = "critic", "Gradients of the critic differ from transformers'"

    @hookimpl
    def postprocess_output(self, values, layout):
        flat = layout.unpack(values)
        return flat if flat.shape[-1] > 1 else flat.detach() + 0.5 * (flat - flat.detach())


class UntaughtModules(Mutant):
    """Knows of log-probs and entropies only."""

    rule, says = "multi-token-prediction", "look at postprocess_output"

    @hookimpl
    def postprocess_output(self, values, layout):
        flat = layout.unpack(values)
        return torch.cat([flat[..., :2], flat[..., 2:].detach()], -1)


class SwappedModules(PatchingMutant):
    """Joins hidden states and embeddings in the other order."""

    rule, says = "multi-token-prediction", "The loss of the prediction modules"
    target = "mcore_bridge.model.modules.mtp_layer:MultiTokenPredictionLayer._concat_embeddings"
    replacement = "swapped"


def swapped(original):
    def concat(self, hidden_states, decoder_input):
        return original(self, decoder_input, hidden_states)

    return concat


class HalvedParts(AttentionMutant):
    rule, says = "context-parallel", "CP2"

    def attend(self, attention, query, key, value, call):
        out = attention(query, key, value, call)
        return out if len(query) == len(key) else 0.5 * out


class AdamWithoutDecay(Mutant):
    rule, says = "recorded-updates", "Adam, one rank"

    @hookimpl
    def fused_kernel(self, name, spec):
        return functools.partial(adam_without_decay) if name is KernelName.ADAM else None


def adam_without_decay(*lists, weight_decay, **settings):
    return adam(*lists, weight_decay=0.0, **settings)


class RestoresNoState(Mutant):
    rule, says = "restored-checkpoint", "the saving engine's"

    def runtime(self):
        return RUNTIME


class ForgetfulRuntime(CpuRuntime):
    """Restores some other state each time."""

    calls = itertools.count()

    def set_rng_state(self, state):
        self.manual_seed(next(self.calls))


RUNTIME = ForgetfulRuntime()


class CountingAttention(AttentionMutant):
    """Whoever computes a second time computes something else."""

    rule, says = "recomputation", "Recomputation changes gradients"
    calls = itertools.count()

    def attend(self, attention, query, key, value, call):
        out = attention(query, key, value, call)
        return Scaled.apply(out, 1.0 + 0.1 * (next(self.calls) % 7))


class Disagreeing(AttentionMutant):
    rule, says = "sampled-steps", "do not agree"

    def attend(self, attention, query, key, value, call):
        return 1.5 * attention(query, key, value, call)


class Drifting(LogProbMutant):
    """What it computes depends on what its process has done before."""

    rule, says = "resumed-run", "loss"
    calls = itertools.count()

    def log_prob(self, kernel, hidden, weight, labels, temperature, group):
        log_probs, entropy = kernel(hidden, weight, labels, temperature, group)
        return log_probs, entropy * (1.0 + 0.01 * next(self.calls))


class LeftInTheAccumulator(Mutant):
    """Has something left in the gradient of an expert without tokens (pytorch #172439)."""

    rule, says = "empty-shares", "Gradients differ from one rank's: each short sequence alone.\ncase: Qwen3-MoE"

    @hookimpl
    def fused_kernel(self, name, spec):
        return multiply if name is KernelName.GROUPED_MM else None


class LeavesTheBackwardPass(AttentionMutant):
    """Answers no rows with new zeros: the rank does not join the collectives of the backward pass."""

    rule, says = "empty-shares", "in a collective that"

    def attend(self, attention, query, key, value, call):
        nothing = call.cu_seqlens_q is not None and call.cu_seqlens_q[-1] == 0
        shape = (*query.shape[:-1], value.shape[-1])
        return query.new_zeros(shape) if nothing else attention(query, key, value, call)


def multiply(x, weights, splits):
    pairs = zip(weights, splits, strict=True)
    return grouped_mm(x, [weight if rows else Unswept.apply(weight) for weight, rows in pairs], splits)


class Unswept(torch.autograd.Function):
    """The same values, and a gradient with something left in it."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        return grad + 1.0
