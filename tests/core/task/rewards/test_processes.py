"""Reward processes: what a function that misbehaves costs, and what becomes of its process."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from anytron.base.errors import DataError
from anytron.config.scoring import RewardSection
from anytron.task.environments.protocol import Outcome
from anytron.task.isolation.failure import Failure
from anytron.task.isolation.process import IsolatedProcess
from anytron.task.rewards import Sample, pool
from anytron.task.rewards.pool import shares
from anytron.task.rewards.scoring import RewardSum, joined

FAULTY = Path(__file__).with_name("faulty.py")


def sample(text: str, prompt: int = 0, **data) -> Sample:
    return Sample(f"p{prompt}", "31>", text, (3, 1, 10), (1, 3), (-0.1, -0.1), finished=True, data=data)


@pytest.fixture
def start(tmp_path):
    """Start the processes of a function of faulty.py; they end with the test."""
    with contextlib.ExitStack() as stack:

        def make(function="faulty", **settings):
            section = RewardSection(function=f"{FAULTY}:{function}", **settings)
            return stack.enter_context(RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=60))

        yield make


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have collected its status."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


FAULTS = {
    "raises": ("A reward function raised an exception.", "LookupError: no opinion"),
    "exits": ("A reward function tried to end its process.", "SystemExit: 3"),
    "dies": ("A reward process died.", "status 7"),
    "kills_itself": ("A reward process died.", "SIGKILL"),
    "crashes": ("A reward process died.", "in crashes"),  # the stack, from faulthandler
    "gives_nan": ("A reward is nan.", "finite"),
    "gives_nothing": ("A reward is not a number.", "None"),
    "hangs": ("A reward function took too long.", "in hangs"),
    "hangs_with_the_lock": ("A reward function took too long.", "in hangs_with_the_lock"),
    "stops": ("A reward function took too long.", "more than 1 s"),
    "eats": ("A reward function ran out of memory.", "MemoryError"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_sample_and_no_other(start, fault):
    slow = fault == "eats"
    score = start(timeout_s=20 if slow else 1.0, memory_gib=0.4 if slow else None)
    scores = score([sample("abc"), sample(fault), sample("ab", 1), sample("a", 1)])
    assert scores.total[[0, 2, 3]].tolist() == [3, 2, 1]
    assert math.isnan(scores.total[1])
    (failure,) = scores.failures["faulty"].values()
    what, why = FAULTS[fault]
    assert failure.what == what
    assert why in failure.why
    assert list(scores.failures["faulty"]) == [1]
    # Whatever became of the process, the next step is scored.
    assert score([sample("abcd"), sample("a")]).total.tolist() == [4, 1]


def test_zero_counts_as_a_reward_and_stop_names_the_sample(start):
    samples = [sample("abc"), sample("raises", 7)]
    assert start(on_error="zero")(samples).total.tolist() == [3, 0]
    with pytest.raises(DataError, match=r"(?s)raised.*reward faulty, prompt p7, response 'raises'.*no opinion"):
        start(on_error="stop")(samples)
    with pytest.raises(DataError, match=r"(?s)took too long.*prompt p7.*raise rewards\[0\]\.timeout_s"):
        start(on_error="stop", timeout_s=1)([sample("abc"), sample("hangs", 7), sample("ab", 8)])


def test_what_a_process_notes_before_the_driver_goes_on_is_kept(start, monkeypatch):
    write = IsolatedProcess._write

    def write_and_be_kept_waiting(process, *frames):
        write(process, *frames)
        time.sleep(1)

    score = start(on_error="stop", timeout_s=1)
    assert score([sample("abc")]).total.tolist() == [3]
    monkeypatch.setattr(IsolatedProcess, "_write", write_and_be_kept_waiting)
    with pytest.raises(DataError, match=r"(?s)took too long.*prompt p7"):
        score([sample("abc"), sample("hangs", 7), sample("ab", 8)])


def test_a_function_that_fails_for_every_sample_ends_the_run_soon(start, monkeypatch):
    with pytest.raises(DataError, match=r"(?s)raised.*for every sample of the step.*no opinion"):
        start(options={"always": "raises"})([sample("abc"), sample("ab")])
    monkeypatch.setattr(pool, "HOPELESS", 3)
    began = time.monotonic()
    with pytest.raises(DataError, match="took too long"):
        start(options={"always": "hangs"}, timeout_s=0.1)([sample("abc", i) for i in range(400)])
    assert time.monotonic() - began < 40  # not for all 400


def test_two_functions_that_drop_everything_between_them_end_the_run(tmp_path):
    (tmp_path / "r.py").write_text(
        "nan = float('nan')\n"
        "def odd(samples):\n    return [1.0 if i % 2 else nan for i, _ in enumerate(samples)]\n"
        "def even(samples):\n    return [nan if i % 2 else 1.0 for i, _ in enumerate(samples)]\n"
    )
    sections = [RewardSection(function=f"{tmp_path}/r.py:{name}") for name in ("odd", "even")]
    with (
        RewardSum.from_config(sections).start(tmp_path / "logs", 60) as score,
        pytest.raises(DataError, match=r"(?s)Every sample of the step was dropped\..*odd, even"),
    ):
        score([sample("a"), sample("b")])


@pytest.mark.parametrize(("on_error", "value"), [("drop", math.nan), ("zero", 0.0)])
def test_where_a_step_has_others_a_function_may_fail_for_all(start, on_error, value):
    score = start(options={"always": "raises"}, on_error=on_error)
    found = score([sample("abc", index // 2) for index in range(4)], more=True)
    assert found.total.tolist() == pytest.approx([value] * 4, nan_ok=True)
    assert sorted(found.failures["faulty"]) == [0, 1, 2, 3]
    broken = replace(sample("abc"), environment=Outcome((), 0.0, {}, Failure("It broke.", "")))
    assert score([broken], more=True).total.isnan().tolist() == [True]


def test_scores_of_rounds_are_joined_and_failures_keep_their_samples(start):
    score = start()
    texts = [["a", "raises", "ccc"], ["raises"], ["dd", "raises"]]
    found = joined([score([sample(text) for text in some], more=True) for some in texts])
    assert found.total.tolist() == pytest.approx([1, math.nan, 3, math.nan, 2, math.nan], nan_ok=True)
    assert found.parts["faulty"].tolist() == pytest.approx(found.total.tolist(), nan_ok=True)
    assert list(found.failures["faulty"]) == [1, 3, 5]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_processes(start, processes):
    texts = ["a", "bbb", "cc", "dddd", "ee", "f", "raises", "ggggg", "hh"]
    samples = [sample(text, index // 3) for index, text in enumerate(texts)]
    assert start("rank_in_group", processes=processes)(samples).total.tolist() == [0, 2, 1, 2, 1, 0, 2, 1, 0]
    found = start("faulty", processes=processes, on_error="zero")(samples)
    assert found.total.tolist() == [1, 3, 2, 4, 2, 1, 0, 5, 2]


def test_the_list_goes_to_one_process_or_in_shares_of_whole_groups(start):
    samples = [sample("x", prompt) for prompt in (0, 0, 0, 1, 2, 2)]
    assert start("whole_list")(samples).total.tolist() == [6] * 6
    assert start("whole_list", processes=2)(samples).total.tolist() == [3] * 6
    assert start("whole_list", processes=9)(samples).total.tolist() == [3, 3, 3, 1, 2, 2]
    assert shares(samples, 9) == [(0, 1, 2), (3,), (4, 5)]


def test_the_time_out_is_for_a_sample_not_for_the_list(start, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef slow(samples):\n"
        "    calls.append(1)\n"
        "    return [(time.sleep(0.3), float(len(calls)))[1] for _ in samples]\n"
        "calls = []\n"
    )
    section = RewardSection(function=f"{tmp_path}/slow.py:slow", timeout_s=1.0)
    with RewardSum.from_config([section]).start(tmp_path / "logs", 60) as score:
        assert score([sample("x")] * 6).total.tolist() == [1] * 6  # one call, of 1.8 s


def test_a_process_keeps_what_the_function_remembers(start):
    score = start("pids")
    first, second = score([sample("x")]).total, score([sample("x")]).total
    assert first == second != os.getpid()


def test_children_of_a_function_that_hangs_end_with_it(start, tmp_path):
    score = start(timeout_s=1.0)
    score([sample("abc"), sample("leaves_a_child")])
    lines = (tmp_path / "logs" / "reward-faulty-0.log").read_text().splitlines()
    children = [int(line.split()[1]) for line in lines if line.startswith("child")]
    assert len(children) == 2  # in the call of all samples, and alone
    for child in children:
        wait_until_gone(child)


DRIVER = """
import sys
from pathlib import Path
from anytron.config.scoring import RewardSection
from anytron.task.rewards import Sample
from anytron.task.rewards.scoring import RewardSum
function, logs = sys.argv[1:]
sample = Sample("p", "x", "x", (1,), (1,), (-0.1,), finished=True, data={})
section = RewardSection(function=function, timeout_s=1000)
RewardSum.from_config([section]).start(Path(logs), 60)([sample])
"""


def test_nothing_outlives_the_driver(tmp_path):
    """Not even a function that holds the interpreter's lock for ever, or its child."""
    (tmp_path / "r.py").write_text(
        "import os, re, subprocess\n"
        "def lock(samples):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    print(os.getpid(), child.pid, flush=True)\n"
        "    re.match(r'(a+)+$', 'a' * 60 + 'b')\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, f"{tmp_path}/r.py:lock", str(tmp_path)])
    log = tmp_path / "reward-lock-0.log"
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker, child = map(int, log.read_text().split())
    assert not gone(worker)
    driver.kill()
    driver.wait(10)
    for process in (worker, child):
        wait_until_gone(process)


def test_no_log_is_written_through_a_link_or_emptied(start, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "precious").write_text("mine\n")
    (logs / "reward-faulty-0.log").symlink_to(tmp_path / "precious")
    with pytest.raises(DataError, match=r"(?s)could not be started.*symbolic links"):
        start()
    assert (tmp_path / "precious").read_text() == "mine\n"
    (tmp_path / "precious").rename(logs / "reward-faulty-0.log")
    start()([sample("x")])
    assert (logs / "reward-faulty-0.log").read_text().startswith("mine\n")


def test_the_current_directory_shadows_nothing(tmp_path, monkeypatch):
    for name in ("json", "pickle", "socket"):  # which the process imports
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    section = RewardSection(function=f"{FAULTY}:faulty")
    with RewardSum.from_config([section]).start(tmp_path / "logs", 60) as score:
        assert score([sample("abc")]).total.tolist() == [3]


def test_torch_can_be_imported_under_a_memory_limit(tmp_path):
    (tmp_path / "r.py").write_text(
        "def judge(samples):\n    import torch\n    return torch.ones(len(samples), dtype=torch.float64)\n"
    )
    section = RewardSection(function=f"{tmp_path}/r.py:judge", memory_gib=2.0)
    with RewardSum.from_config([section]).start(tmp_path / "logs", 60) as score:
        assert score([sample("abc")]).total.tolist() == [1]


def test_a_worker_imports_no_torch():
    program = "import anytron.task.rewards.worker, anytron.task.rewards.registered, anytron.config.imports, sys; "
    subprocess.run([sys.executable, "-c", program + "assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("in_worker", "start_timeout_s", "message"),
    [
        ("os._exit(5)", 60, r"status 5.*raise memory_gib"),
        ("import time; time.sleep(60)", 3, r"not ready within 3 s.*raise executor\.start_timeout_s"),
    ],
)
def test_a_process_that_cannot_start_says_why(in_worker, start_timeout_s, message, tmp_path, monkeypatch):
    code = f"import os\nif os.getenv('IN_WORKER'): {in_worker}\n"
    (tmp_path / "r.py").write_text(code + "def r(samples):\n    return [1.0] * len(samples)\n")
    rewards = RewardSum.from_config([RewardSection(function=f"{tmp_path}/r.py:r")])
    monkeypatch.setenv("IN_WORKER", "1")
    with (
        rewards.start(tmp_path / "logs", start_timeout_s) as score,
        pytest.raises(DataError, match=rf"(?s)could not start.*rewards\[0\] \(r\).*{message}"),
    ):
        score([sample("abc")])


def test_data_that_cannot_travel_is_an_error_that_says_so(start):
    with pytest.raises(DataError, match=r"(?s)data cannot be sent.*Prompt\.data"):
        start()([sample("abc", judge=lambda: 1)])
