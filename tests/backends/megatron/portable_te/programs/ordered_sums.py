"""One of several ranks whose parts are added: company-invariant sums have the order of the ranks, others none."""

import torch
import torch.distributed as dist

from anytron.device.loading import hooks_of
from anytron_megatron.portable_te.binding import bind
from anytron_megatron.portable_te.pytorch import collectives

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
hooks = hooks_of()
bind(hooks, "cpu")

parts = torch.randn(size, 4096, 8, generator=torch.Generator().manual_seed(0))
in_order = parts[0]
for part in parts[1:]:
    in_order = in_order + part
whole = parts[rank].requires_grad_()

usual = collectives.reduce(whole, group)
assert not torch.equal(usual, in_order), "the library adds in the order of the ranks by itself: this shows nothing"
hooks.invariant = True
for rows in (1, 7, 4096):
    assert torch.equal(collectives.reduce(whole[:rows], group), in_order[:rows])
share = collectives.reduce_scatter_first(whole, group)
assert torch.equal(share, in_order.chunk(size)[rank])
share.sum().backward()
assert torch.equal(whole.grad, torch.ones_like(whole))
