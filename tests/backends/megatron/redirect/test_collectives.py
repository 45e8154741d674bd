"""Backends named after CUDA; NCCL accepts strided and uneven chunks, other shapes and PREMUL_SUM, gloo does not."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from anytron_megatron.redirect.collectives import translated_backend
from tests.backends.megatron.redirect.conftest import HostRuntime
from tests.house import ROOT

RESTRICTED = ["scatter", "all_gather", "gather_into_one", "reduce_and_scatter_one", "multiply_and_sum"]
UNRESTRICTED = ["average", "coalesced", "nothing", "point_to_point", "objects"]


def run(collectives, tmp_path, redirect, *platform, **environment):
    """What two ranks print: a line for each collective, or why there is none."""
    arguments = [str(tmp_path / "store"), str(redirect), ",".join(collectives), *platform]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.backends.megatron.redirect.collective_rank", str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    return [out.splitlines() or err for out, err in outputs]


def right(*collectives):
    return 2 * [[f"{collective} RIGHT" for collective in collectives]]


def test_every_rank_receives_its_chunk(tmp_path):
    assert run([*RESTRICTED, *UNRESTRICTED], tmp_path, redirect=True) == right(*RESTRICTED, *UNRESTRICTED)


@pytest.mark.parametrize("collective", RESTRICTED)
def test_without_the_redirection_they_do_not(collective, tmp_path):
    # If this begins to fail, gloo was fixed, and this part of redirect/collectives.py can go.
    assert run([collective], tmp_path, redirect=False) != right(collective)


class NpuRuntime(HostRuntime):
    device_type = "npu"
    communication_backend = "hccl"


@pytest.mark.parametrize(
    ("named", "on_host", "on_npu"),
    [
        ("nccl", "gloo", "hccl"),
        ("NCCL", "gloo", "hccl"),
        ("cuda:nccl", "cpu:gloo", "npu:hccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo", "cpu:gloo,npu:hccl"),
        ("cpu:gloo,cuda:hccl", "cpu:gloo", "cpu:gloo,npu:hccl"),
        ("gloo", "gloo", "gloo"),
        ("mpi", "mpi", "mpi"),
        ("cpu:gloo,xpu:xccl", "cpu:gloo,xpu:xccl", "cpu:gloo,xpu:xccl"),
    ],
)
def test_the_backend_of_a_device(named, on_host, on_npu):
    assert translated_backend(named, HostRuntime()) == on_host
    assert translated_backend(named, NpuRuntime()) == on_npu


@pytest.mark.usefixtures("redirected")
def test_groups_for_cuda_are_the_runtimes(tmp_path):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for group in (None, dist.new_group([0], backend="nccl"), dist.new_group([0], None, dist.Backend.NCCL)):
            value = torch.ones(2, device="cuda")
            dist.all_reduce(value, group=group)
            assert dist.get_backend(group).endswith("gloo")
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("redirected")
def test_meshes_of_cuda_are_meshes_of_the_device(tmp_path):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        meshes = [
            dist.DeviceMesh("cuda", [0]),
            dist.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)),
            dist.DeviceMesh.from_group(dist.group.WORLD, "cuda"),
        ]
        assert {mesh.device_type for mesh in meshes} == {"cpu"}
        layer = torch.nn.Linear(4, 2, device="cuda")
        sharded = fully_shard(layer, mesh=meshes[2])  # Megatron's TorchFullyShardedDataParallel does so
        assert sharded(torch.ones(3, 4)).shape == (3, 2)
    finally:
        dist.destroy_process_group()
