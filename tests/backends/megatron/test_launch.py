"""``anytron-megatron``: mistakes are named before a rank starts; scripts see what they would see from Megatron-LM."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from anytron.device.patches.plan import in_range
from anytron_megatron import launch

MEGATRON = version("megatron-core")
ASKS_NVCC = in_range(MEGATRON, "<0.17")
HAS_TRAINING = in_range(MEGATRON, ">=0.17")
"""Whether ``megatron.training`` is in the package megatron-core, not only in checkouts."""

SCRIPT = r"""
import json, sys
import torch
from megatron.training.initialize import initialize_megatron
found = {"name": __name__, "argv": sys.argv, "path": sys.path[0], "initialized": initialize_megatron()}
found["device"] = str(torch.ones(1).cuda().device)
if __name__ == "__main__":
    torch.distributed.init_process_group("nccl")
    ranks = torch.ones(1).cuda()
    torch.distributed.all_reduce(ranks)
import multiprocessing

def device_of_child():
    import transformer_engine
    return str(torch.ones(1).cuda().device)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawned"] = pool.apply(device_of_child)
    sys.stdout.write(json.dumps({**found, "ranks": ranks.item()}) + "\n")  # in one piece: ranks share the pipe
"""


ASKING = "from megatron.legacy import fused_kernels\nfused_kernels.load(None)\n"
"""What scripts do before 0.17."""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the functions of Megatron-LM that are patched, each of which fails without the patch."""
    files = {
        "megatron/training/__init__.py": "",
        "megatron/training/initialize.py": "def initialize_megatron(allow_no_cuda=False):\n    return allow_no_cuda\n",
        "pretrain.py": SCRIPT,
    }
    if ASKS_NVCC:
        files |= {
            "megatron/legacy/__init__.py": "",
            "megatron/legacy/fused_kernels/__init__.py": "def load(args):\n    raise OSError('nvcc')\n",
            "pretrain.py": ASKING + SCRIPT,
        }
    for name, text in files.items():
        path = tmp_path / "lm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "lm"


def refused(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["anytron-megatron", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # It would open the device stack in this process, and fail the tests after this one.
    monkeypatch.setattr(launch, "_run", lambda script, _: pytest.fail(f"{script} was run"))
    with pytest.raises(SystemExit) as ended:
        launch.main()
    return ended.value.code, capsys.readouterr().err


def test_help_and_wrong_usage(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anytron-megatron", "--help"])
    launch.main()
    assert capsys.readouterr().out == launch.USAGE
    assert refused(capsys, monkeypatch) == (2, launch.USAGE)


def test_mistakes_are_named(capsys, monkeypatch, tmp_path, checkout):
    assert refused(capsys, monkeypatch, "no.py")[0] == 1
    status, said = refused(capsys, monkeypatch, str(tmp_path / "pretrain_gpt.py"))
    assert status == 1
    assert f"error: There is no file {tmp_path / 'pretrain_gpt.py'}." in said
    monkeypatch.setenv("NPROC_PER_NODE", "two")
    status, said = refused(capsys, monkeypatch, str(checkout / "pretrain.py"))
    assert status == 1
    assert "NPROC_PER_NODE is 'two', which is not a number of ranks." in said


def test_a_script_outside_of_a_checkout_needs_a_package_that_has_the_trainer(capsys, monkeypatch, tmp_path):
    alone = tmp_path / "alone.py"
    alone.touch()
    assert (find_spec("megatron.training") is not None) == HAS_TRAINING
    if HAS_TRAINING:
        started = []
        with monkeypatch.context() as patches:
            patches.setattr(sys, "argv", ["anytron-megatron", str(alone), "--lr", "1"])
            patches.setattr(sys, "path", list(sys.path))
            patches.setenv("LOCAL_RANK", "0")
            patches.setattr(launch, "_run", lambda *arguments: started.append((*arguments, *sys.argv)))
            launch.main()
        assert started == [(alone, "__main__", str(alone), "--lr", "1")]
        monkeypatch.setattr(launch, "find_spec", {}.get)  # as before 0.17
    status, said = refused(capsys, monkeypatch, str(alone))
    assert status == 1
    assert "There is no module megatron.training." in said
    assert f"--branch core_v{MEGATRON} " in said


def test_another_version_of_megatron_core_is_refused(capsys, monkeypatch, checkout):
    core = checkout / "megatron" / "core"
    core.mkdir()
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 1\nPRE_RELEASE = ''\n")
    (checkout / "tools").mkdir()
    (checkout / "tools" / "serve.py").touch()
    for script in ("pretrain.py", "tools/serve.py"):
        status, said = refused(capsys, monkeypatch, str(checkout / script))
        assert status == 1
        assert f"The checkout has megatron-core 0.99.1, and {MEGATRON} is installed." in said
        assert f"fix: git -C {checkout} checkout core_v{MEGATRON}" in said


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n", "0.16.1"),
        ("MAJOR = 0\nMINOR = 17\nPATCH = 0\nPRE_RELEASE = 'rc0'\n", "0.17.0rc0"),
    ],
)
def test_the_version_of_a_checkout(tmp_path, text, number):
    (tmp_path / "package_info.py").write_text(text)
    assert str(launch._version_of(tmp_path)) == number


def test_a_script_in_a_subfolder_imports_from_the_checkout(monkeypatch, checkout):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (checkout / "tools").mkdir()
    script = checkout / "tools" / "serve.py"
    script.touch()
    launch._require_checkout(script)
    assert sys.path[:2] == [str(checkout / "tools"), str(checkout)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_runs_as_the_main_program_of_each_rank(checkout, ranks):
    script = checkout / "pretrain.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "anytron_megatron.launch", str(script), "--lr", "1"],
        env={**os.environ, "ANYTRON_PLATFORM": "cpu", "NPROC_PER_NODE": str(ranks)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {
        "name": "__main__",
        "argv": [str(script), "--lr", "1"],
        "path": str(checkout),
        "initialized": True,
        "spawned": "cpu",
    }
    assert printed == [{**found, "device": "cpu", "ranks": ranks}] * ranks
