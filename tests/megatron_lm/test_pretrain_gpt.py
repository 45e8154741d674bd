"""Megatron-LM's pretrain_gpt.py, unmodified: its first loss is transformers', and it learns."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import ROOT
from tests.megatron_lm import VARIABLE

CHECKOUT = os.environ.get(VARIABLE, "")
pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not CHECKOUT, reason=f"{VARIABLE} names no checkout of Megatron-LM"),
]
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--make-vocab-size-divisible-by 64 --no-gradient-accumulation-fusion --micro-batch-size 2 --global-batch-size 4 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --log-interval 1 --eval-iters 0 --eval-interval 1000"
)
LAYOUTS = {
    "one rank": (1, ()),
    "tensor and sequence parallel": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "data parallel, distributed optimizer": (2, ("--use-distributed-optimizer",)),
}


def train(ranks, *options, model=MODEL):
    """The losses of a run."""
    launch = [sys.executable, "-W", "ignore", "-m", "anytron_megatron.launch", f"{CHECKOUT}/pretrain_gpt.py"]
    own = {"ANYTRON_PLATFORM": "cpu", "NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *model, *options], env={**os.environ, **own},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_loss_is_that_of_transformers(layout, tmp_path):
    ranks, options = LAYOUTS[layout]
    save = ("--save", str(tmp_path), "--save-interval", "1", "--ckpt-format", "torch")
    (loss,) = train(ranks, "--train-iters", "1", "--lr", "0", "--min-lr", "0", *save, *options)
    split = ranks if "--tensor-model-parallel-size" in options else 1
    program = Path(__file__).parent / "first_loss.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), CHECKOUT, str(tmp_path), str(split)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert loss == pytest.approx(float(done.stdout.split("loss ")[1]), rel=1e-5)


def test_the_command_of_the_page(tmp_path):
    """It also saves in Megatron's own format, for which Megatron starts further processes."""
    text = (ROOT / "docs" / "how-to" / "run-megatron-lm.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"anytron-megatron \S+ \\\n((?:    .+\n)+)", text)
    options = shlex.split(command.replace("\\\n", " "))
    losses = train(2, *options, "--save", str(tmp_path), "--save-interval", "20", model=())
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_it_learns():
    losses = train(1, "--train-iters", "20", "--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant")
    assert losses[-1] < 0.8 * losses[0]
