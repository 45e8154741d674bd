"""Context-parallel ranks put their slots together; the gradient stays with the rank that computed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from anytron.device.loading import hooks_of
from anytron.sequences.layout import ContextShard
from anytron.sequences.planning import plan_layout

LENGTHS = [5, 1, 9]


def _rank(rank: int, size: int, store: str, format: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        shard = ContextShard(size, rank, dist.group.WORLD)
        layout = plan_layout(LENGTHS, format=format, shard=shard)
        flat = torch.randn(sum(LENGTHS), 2, generator=torch.Generator().manual_seed(0))
        local = layout.pack(flat).requires_grad_()
        whole = hooks_of().postprocess_output(local, layout)
        assert torch.equal(whole, flat)
        whole.sum().backward()
        assert torch.equal(local.grad, layout.valid[..., None].expand_as(local).float())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_every_rank_gets_all_tokens_and_the_gradient_of_its_own(tmp_path, format):
    mp.spawn(_rank, args=(2, str(tmp_path / "store"), format), nprocs=2)


def test_the_group_is_no_part_of_a_shard_s_identity():
    assert ContextShard(2, 1) == ContextShard(2, 1, group=object())
