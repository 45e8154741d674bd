"""A micro-batch makes the host wait for the device at most once: for lengths that are on the device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.sequences.layout import ContextShard
from anytron.sequences.masks import MaskKind, MaskRequest
from anytron.sequences.planning import plan_layout

LENGTHS = torch.tensor([3, 1, 6])
TRAITS = ModelTraits(linear_attention=True, mixture_of_experts=True)

DATA_DEPENDENT = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}


class CountHostCopies(TorchDispatchMode):
    """Count what would make the host wait for a device; the `meta` device stands for it.

    A copy of the one tensor that is known to lie there is answered; `meta` itself refuses all others.
    """

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known = known
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        there = [a for a in args if isinstance(a, torch.Tensor) and a.device.type == "meta"]
        to_host = func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        if there and (to_host or func in DATA_DEPENDENT):
            self.copies += 1
            if to_host and there[0].shape == self.known.shape:
                return self.known.clone()
        return func(*args, **kwargs)


@pytest.mark.parametrize(("where", "copies"), [("cpu", 0), ("meta", 1)])
@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_one_micro_batch(format, cp, where, copies):
    lengths, tokens = LENGTHS.to(where), torch.empty(10, dtype=torch.int64, device="meta")
    output = torch.empty(10, 2, device="meta")
    hooks = hooks_of()
    request = MaskRequest(format, TRAITS, ParallelSizes(context=cp), frozenset({MaskKind.NONE, MaskKind.PADDING_2D}))
    with CountHostCopies(LENGTHS) as counted:
        layout = plan_layout(
            lengths, format=format, tensor_parallel=2, shard=ContextShard(cp), input_layout="whole", device="meta"
        )
        ids, labels = layout.taken.pack(tokens), layout.next_tokens(tokens)
        mask = hooks.build_attn_mask(MaskRequest(format, TRAITS, request.parallel, request.accepted, layout))
        gather = (lambda own: own.repeat(cp, *[1] * (own.ndim - 1))) if cp > 1 else None
        flat = layout.unpack(layout.pack(output), gather)
    assert counted.copies == copies
    tensors = (ids, labels, mask.padding_mask, mask.linear_attn_mask, flat)
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_the_count_sees_what_it_counts():
    with CountHostCopies(LENGTHS) as counted:
        LENGTHS.to("meta").cpu()
        with pytest.raises(RuntimeError):
            torch.ones((), device="meta").item()
        with pytest.raises(NotImplementedError):
            torch.ones(2, 2, device="meta").cpu()
    assert counted.copies == 3
