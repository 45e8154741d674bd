"""Scatter of strided chunks over gloo, in two real processes."""

import subprocess
import sys

PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
torch.set_num_threads(1)
rank, path, redirect = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2, timeout=timedelta(seconds=60))
if redirect:
    from anytron_megatron.redirect.collectives import substitutions
    from anytron_megatron.redirect.substitution import substitute
    substitute(substitutions())
whole = torch.arange(8.0).reshape(2, 4)
received = torch.empty(2, 2)
chunks = list(whole.chunk(2, dim=1))
dist.scatter(received, chunks if rank == 0 else None, src=0)
print("RIGHT" if torch.equal(received, chunks[rank]) else "WRONG", flush=True)
dist.destroy_process_group()
"""


def scattered(tmp_path, redirect):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), str(redirect)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    return [out.strip() or err for out, err in outputs]


def test_every_rank_receives_its_chunk(tmp_path):
    assert scattered(tmp_path, redirect=True) == ["RIGHT", "RIGHT"]


def test_without_the_redirection_they_do_not(tmp_path):
    # If this begins to fail, gloo was fixed, and redirect/collectives.py can go.
    without = scattered(tmp_path, redirect=False)
    assert without != ["RIGHT", "RIGHT"]
