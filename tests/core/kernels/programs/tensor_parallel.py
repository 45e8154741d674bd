"""One of two ranks: half of the rows of an output layer each, against the definition."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from anytron.kernels.contract import LogProbSpec
from anytron.kernels.log_prob import make_log_prob
from tests.log_prob_oracle import Problem, assert_close


def check(problem: Problem) -> None:
    rows = slice(dist.get_rank() * len(problem.weight) // 2, (dist.get_rank() + 1) * len(problem.weight) // 2)
    hidden = problem.hidden.float().requires_grad_()
    weight = problem.weight[rows].float().requires_grad_()
    kernel = make_log_prob(LogProbSpec(problem.entries, 2, 1))
    results = kernel(hidden, weight, problem.labels, problem.temperature, dist.group.WORLD)
    grad_hidden, grad_weight = torch.autograd.grad(results, (hidden, weight), tuple(problem.upstream.float()))
    dist.all_reduce(grad_hidden)  # each rank has its part
    *right, right_weight = problem.by_definition()
    assert_close([*(one.detach() for one in results), grad_hidden, grad_weight], [*right, right_weight[rows]])


torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2, timeout=timedelta(seconds=60)
)
check(Problem.random(0, 9, 5000, padding=2, temperature=0.8))  # tiles on each rank
check(Problem.random(1, 9, 7, padding=9))  # nothing but padding on the last rank
check(Problem.random(2, 0, 7, padding=1))  # no tokens
dist.destroy_process_group()
