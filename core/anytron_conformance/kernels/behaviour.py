"""Rules about the behaviour of every kernel: its devices, its calls, and its random numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anytron.device.platform import Feature
from anytron.kernels.contract import AttentionCall
from anytron.kernels.oracles.attention import reference_attention
from anytron_conformance.kernels.attention_calls import SCALE, Layer, Packing, packed, padded
from anytron_conformance.kernels.comparison import in_dtypes
from anytron_conformance.kernels.fused import (
    adam_of,
    grouped_mm_of,
    layer_norm_of,
    linear_of,
    rms_norm_of,
    rope_of,
    swiglu_of,
)
from anytron_conformance.kernels.linear_attention import convolution_of, delta_rule_of, scan_of
from anytron_conformance.kernels.log_probs import Problem
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron_conformance.kernels.comparison import Comparison
    from anytron_conformance.subject import Subject

    Comparisons = tuple[Comparison, Comparison]


@dataclass(frozen=True)
class Sample:
    """One kernel, with calls on which its behaviour is checked.

    Attributes:
        calls: Function that makes two calls of different shapes, for operands of a dtype.
        needs: Features that the kernel requires and a platform may lack.
    """

    calls: Callable[[Subject, torch.dtype], Comparisons]
    needs: tuple[Feature, ...] = ()


def _packed_attention(subject: Subject, dtype: torch.dtype) -> Comparisons:
    layer = Layer(4, 2)
    attend = layer.kernel(subject)
    small, large = Packing((3, 2), gaps=(1, 0)), Packing((1, 4, 2), gaps=(0, 0, 3))
    return packed(subject, layer, small, dtype, attend), packed(subject, layer, large, dtype, attend)


def _padded_attention(subject: Subject, dtype: torch.dtype) -> Comparisons:
    layer = Layer(4, 2)
    attend = layer.kernel(subject)
    mask = torch.eye(5, dtype=torch.bool)[None, None]
    return (
        padded(subject, layer, (2, 4, 4), dtype, "causal", attend=attend),
        padded(subject, layer, (1, 5, 5), dtype, "arbitrary", mask, attend=attend),
    )


def _log_probs(subject: Subject, dtype: torch.dtype) -> Comparisons:
    first, second = Problem((0, 3, -100), temperature=0.7), Problem((12, -1, 5, 6, 2))
    score = first.kernel(subject, dtype)
    return first.compared(subject, dtype, score), second.compared(subject, dtype, score)


SAMPLES: Mapping[str, Sample] = MappingProxyType(
    {
        "attention in thd": Sample(_packed_attention, (Feature.THD,)),
        "attention in bshd": Sample(_padded_attention, (Feature.BSHD,)),
        "log-probs": Sample(_log_probs),
        "linear": Sample(lambda subject, dtype: _pair(linear_of, subject, dtype, (3, 8), (2, 3, 8))),
        "rms_norm": Sample(lambda subject, dtype: _pair(rms_norm_of, subject, dtype, (3, 8), (2, 3, 8))),
        "layer_norm": Sample(lambda subject, dtype: _pair(layer_norm_of, subject, dtype, (3, 8), (2, 3, 8))),
        "swiglu": Sample(lambda subject, dtype: _pair(swiglu_of, subject, dtype, (3, 8), (2, 3, 12))),
        "rope": Sample(lambda subject, dtype: _pair(_turned, subject, dtype, (3, 2, 16), (5, 2, 16))),
        "grouped_mm": Sample(
            lambda subject, dtype: _pair(grouped_mm_of, subject, dtype, (2, 3), (4, 0)), (Feature.MIXTURE_OF_EXPERTS,)
        ),
        "causal_conv1d": Sample(
            lambda subject, dtype: _pair(convolution_of, subject, dtype, (2, 5), (4, 1)), (Feature.LINEAR_ATTENTION,)
        ),
        "gated_delta_rule": Sample(
            lambda subject, dtype: _pair(delta_rule_of, subject, dtype, (2, 5), (4, 1)), (Feature.LINEAR_ATTENTION,)
        ),
        "state_space_scan": Sample(
            lambda subject, dtype: _pair(scan_of, subject, dtype, (2, 5), (4, 1)), (Feature.LINEAR_ATTENTION,)
        ),
        "adam": Sample(lambda subject, dtype: _pair(adam_of, subject, dtype, (5,), (3, 7))),
    }
)


def _turned(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> Comparison:
    return rope_of(subject, dtype, shape, 8, interleaved=False)


def _pair(
    make: Callable[..., Comparison], subject: Subject, dtype: torch.dtype, first: Any, second: Any
) -> Comparisons:
    """Two calls of one kernel: the hook is asked once, as a module asks it."""
    one, two = make(subject, dtype, first), make(subject, dtype, second)
    return one, two


def _cases() -> list[Case]:
    return list(in_dtypes((name, sample, sample.needs) for name, sample in SAMPLES.items()))


@rule(
    "kernel-calls",
    "kernels",
    "A kernel serves many micro-batches: calls may overlap, be repeated in recomputation, and run on other threads.",
    cases=_cases(),
)
def overlapping(subject: Subject, case: Case) -> None:
    """Call a kernel for two micro-batches before either is differentiated, then once more on another thread.

    Pipelines hold several micro-batches at once, and recomputation runs on autograd's threads. A kernel must take
    all inputs from its call: one that stores a tensor or a length between calls breaks the rule.
    """
    dtype, sample = case.values
    first, second = sample.calls(subject, dtype)
    begun = [first.call(subject), second.call(subject)]
    for called in begun:
        called.differentiate()
    raised: list[BaseException] = []

    def again() -> None:
        try:
            first.hold(subject)
        except Exception as error:  # noqa: BLE001 - it is raised below, in the thread that is asked
            raised.append(error)

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@rule(
    "kernel-devices",
    "kernels",
    "A kernel computes on the device of its operands: it does not fall back to another one.",
    cases=_cases(),
)
def on_the_device(subject: Subject, case: Case) -> None:
    """Watch every operation of a kernel's forward and backward pass, and the devices of their results.

    A result on another device is a silent fallback if it has at least as many floating-point numbers as the smallest
    operand. Lengths may go to the host. If the device is the host itself, there is nothing to check.
    """
    dtype, sample = case.values
    for comparison in sample.calls(subject, dtype):
        watch = Watch(subject.device.type, min(one.numel() for one in comparison.operands.values()))

        def watched(*operands: Tensor, attend: Any = comparison.kernel, watch: Watch = watch) -> Any:
            with watch:
                return attend(*operands)

        called = replace(comparison, kernel=watched).call(subject)
        if leaves := [one for one in called.given.values() if one.requires_grad]:
            with watch:
                torch.autograd.grad([result.sum() for result in called.results], leaves, allow_unused=True)
        if watch.elsewhere:
            raise Broken(
                f"The kernel computes on another device than {subject.device.type}.", ", ".join(sorted(watch.elsewhere))
            )


class Watch(TorchDispatchMode):
    """Records the operations whose results are floating-point numbers on another device.

    Args:
        device_type: Device type on which results belong.
        least: Results with fewer numbers are not counted as a fallback.

    Attributes:
        elsewhere: Operations whose results are on another device.
    """

    def __init__(self, device_type: str, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._least = max(2, least)
        self.elsewhere: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            foreign = isinstance(one, Tensor) and one.device.type != self._device_type and one.is_floating_point()
            if foreign and one.numel() >= self._least:
                self.elsewhere.add(f"{function} on {one.device}")
        return result


@rule(
    "kernel-random-numbers",
    "kernels",
    "A kernel without dropout draws no random numbers and leaves the generators as they were.",
    cases=_cases(),
)
def undisturbed(subject: Subject, case: Case) -> None:
    """Compare the states of the device's and the host's generators before and after a forward and a backward pass.

    A kernel that draws random numbers changes all later draws: the same seed would train another model on this
    platform.
    """
    dtype, sample = case.values
    comparison, _ = sample.calls(subject, dtype)
    states = (
        ("device's generator", subject.runtime.get_rng_state),
        ("host's generator", torch.get_rng_state),
    )
    before = [state() for _, state in states]
    called = comparison.call(subject)
    called.differentiate()
    for (name, state), was in zip(states, before, strict=True):
        if not torch.equal(state(), was):
            raise Broken(f"The {name} has a different state after the kernel was called.")


@rule(
    "attention-dropout",
    "kernels",
    "Attention drops weights with the probability call.dropout; gradients pass through the weights that are kept.",
    cases=(
        Case("thd, probability 0, as in evaluation", ("thd", 0.0), 0, (Feature.THD,)),
        Case("bshd, probability 0, as in evaluation", ("bshd", 0.0), 1, (Feature.BSHD,)),
        Case("thd, probability 0.3", ("thd", 0.3), 2, (Feature.THD,)),
        Case("bshd, probability 0.3", ("bshd", 0.3), 3, (Feature.BSHD,)),
    ),
)
def dropping(subject: Subject, case: Case) -> None:
    """Call the kernel of a layer with dropout; values are unit vectors, so that the output shows the attention weights.

    In evaluation nothing is dropped. In training each weight is 0, with probability p, or that of the definition
    divided by 1 - p. If the generator's state is restored, as in recomputation, the same weights are 0; otherwise
    others are. The gradient of the values is the transpose of the weights. A kernel that ignores dropout, or draws from
    a separate generator, breaks the rule: its hook must answer None to such a spec.
    """
    sequence_format, probability = case.values
    check_dropout(subject, sequence_format, probability)


def check_dropout(subject: Subject, sequence_format: str, probability: float) -> None:
    """Check one case of :func:`dropping`."""
    length, heads = 32, 4
    layer = Layer(heads, heads, v_size=length, size=length)
    attend = layer.kernel(subject, dropout=0.3)
    operands = layer.operands((length,), (length,))
    unit = torch.eye(length)[:, None].expand(length, heads, length).contiguous()
    right = reference_attention(operands["queries"], operands["keys"], unit, lengths=[length], scale=SCALE)
    call = Packing((length,)).call("padding_causal", subject.device)
    value = unit.to(subject.device).requires_grad_()
    query, key = (operands[name].to(subject.device) for name in ("queries", "keys"))

    def weights() -> Tensor:
        if sequence_format == "thd":
            found = attend(query, key, value, replace(call, dropout=probability))
        else:
            told = AttentionCall("bshd", "causal", dropout=probability)
            found = attend(query[None], key[None], value[None], told)[0]
        return found

    state = subject.runtime.get_rng_state()
    found = weights()
    subject.runtime.set_rng_state(state)
    again, other = weights(), weights()
    _check_weights(found, right, probability)
    if probability:
        if not torch.equal(found, again):
            raise Broken("With the generator's state restored, other weights were dropped.")
        if torch.equal(again, other):
            raise Broken("A second call dropped the same weights: nothing was drawn from the device's generator.")
    incoming = torch.ones_like(found)
    incoming[:, :, 0] = 2.0
    (gradient,) = torch.autograd.grad(found, value, incoming)
    received = torch.einsum("qhk,qhv->khv", found.detach(), incoming)
    if float((gradient - received).abs().max()) > 1e-4:
        raise Broken("The gradient of the values passes dropped weights, or does not pass kept ones.")


def _check_weights(found: Tensor, right: Tensor, probability: float) -> None:
    got = found.detach().cpu().double()
    kept = got != 0
    off = (got - right / (1 - probability)).abs().masked_fill(~kept & (probability > 0), 0.0)
    if float(off.max()) > 1e-4:
        raise Broken(
            "The weights are wrong where they are not dropped.",
            f"largest difference {float(off.max()):.3g} to the definition divided by {1 - probability:g}, allowed 1e-4",
        )
    seen = right > 0
    share = 1 - float(kept[seen].double().mean())
    # 2112 draws: five standard deviations are 0.05.
    if abs(share - probability) > 0.05:
        raise Broken(
            "The share of dropped weights is not call.dropout.", f"it is {share:.3f}, expected {probability:g}"
        )


RULES = (overlapping, on_the_device, undisturbed, dropping)
