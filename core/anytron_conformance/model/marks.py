"""The rule about the marks of parameters: what Megatron writes on a parameter stays when the model moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.device.stack import open_device_stack
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.training_ranks import START_S

if TYPE_CHECKING:
    from anytron_conformance.subject import Subject

MARKS = {
    "sequence_parallel": True,
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 1,
    "allreduce": False,
    "shared": True,
    "shared_embedding": True,
}
"""Attributes with which Megatron marks parameters (``tensor_parallel/layers.py``, ``transformer/moe/experts.py``)."""


class _Tied(torch.nn.Module):
    """Two layers that share a weight with marks and a hook, which doubles its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.last = torch.nn.Linear(2, 2, bias=False)
        self.last.weight = self.first.weight
        for name, value in MARKS.items():
            setattr(self.first.weight, name, value)
        self.first.weight.register_hook(lambda gradient: 2 * gradient)


@rule(
    "parameters-keep-marks",
    "model",
    "Parameters keep their attributes, hooks and ties when a model moves to the device.",
    limit_s=START_S,
)
def parameters_keep_marks(subject: Subject, case: Case) -> None:
    """Two layers that share a weight move to the device, with the patches of a training process.

    Megatron marks parameters with attributes, by which it sums gradients over ranks. torch makes new parameters for
    devices that a package adds to it. Anytron carries attributes, hooks and ties over where `redirects_torch_cuda` is
    True. A package that replaces `torch.nn.Module.to` or `_apply`, or a platform with `redirects_torch_cuda` False,
    must do so itself.
    """
    del case
    on_ranks(subject, 1, compare_marks)


def compare_marks(member: Member) -> None:
    """Move the layers to this rank's device, and compare the weight with the one before."""
    source = member.subject.source
    with open_device_stack(source.platform, source.options):
        layers = _Tied()
        before = layers.first.weight.detach().clone()
        layers.to(member.subject.device)
        weight = layers.first.weight
        if not torch.equal(weight.detach().cpu(), before):
            raise Broken("A parameter changes when its model moves to the device.")
        lost = [name for name, value in MARKS.items() if getattr(weight, name, None) != value]
        if layers.last.weight is not weight:
            lost.append("the tie of two layers")
        layers.first(torch.ones(1, 2, device=weight.device)).sum().backward()
        gradient = weight.grad
        if gradient is None or not torch.equal(gradient.cpu(), torch.full_like(before, 2.0)):
            lost.append("a hook")
        if lost:
            raise Broken("A parameter loses its marks when its model moves to the device.", f"lost: {', '.join(lost)}")
