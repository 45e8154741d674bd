"""The command line as a person meets it: processes, their output and their exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.core.cli.conftest import COMMAND, EXAMPLE, ROOT, anytron


def environment(process):
    """Environment of a process; empty if it is gone or another user's."""
    try:
        return (process / "environ").read_bytes()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return b""


def running(marker):
    """Pids of processes whose environment holds ``marker``."""
    processes = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(process.name) for process in processes if marker.encode() in environment(process)]


def test_starting_imports_neither_torch_nor_an_engine():
    code = "import sys, anytron.cli.main; print([m for m in ('torch', 'transformers', 'megatron') if m in sys.modules])"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


SHADOWS = ("csv", "dataclasses", "email", "inspect", "json", "logging", "pathlib", "pluggy", "re", "signal", "typing")


@pytest.mark.parametrize("start", [("-m", "anytron"), (str(Path(sys.executable).with_name("anytron")),)])
def test_the_current_directory_shadows_nothing(start, tmp_path):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('this {name} is nobody's')")
    command = [sys.executable, *start, "config", "show", EXAMPLE]

    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "total_steps" in done.stdout


def test_a_full_disk_is_said_in_words_whoever_meets_it(tmp_path):
    """safetensors has errors of its own. What stands for the disk is the largest size of a file."""
    command = [*COMMAND, "train", EXAMPLE, f"trainer.output_dir={tmp_path / 'run'}"]
    limited = ["prlimit", "--fsize=100000", *command]

    done = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 1
    assert "error: A file has reached the largest allowed size." in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_all_commands_and_version_is_the_packages():
    text = anytron("--help").stdout

    assert all(command in text for command in ("train", "doctor", "config", "plugins"))
    assert "..." not in text.partition("Commands:")[2], "a command's short help is a whole sentence"
    assert anytron("--version").stdout.startswith("anytron 0.")


@pytest.mark.parametrize("arguments", [("trian",), ("train",), ("doctor", "--jsno")])
def test_wrong_usage_exits_with_2(arguments):
    done = anytron(*arguments)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_platform_that_cannot_be_used_ends_the_run_quickly_with_what_why_and_fix(clean):
    began = time.monotonic()

    done = anytron("train", EXAMPLE, ANYTRON_PLATFORM="ascend")

    assert time.monotonic() - began < 10
    assert done.returncode == 1
    assert done.stderr.startswith("error: Platform 'ascend'")
    assert all(f"\n  {label}: " in done.stderr for label in ("where", "why", "fix"))
    assert "Traceback" not in done.stderr + done.stdout


def test_a_typo_is_refused_with_the_nearest_key(testchip):
    done = anytron("train", EXAMPLE, "trainer.total_stesp=3")

    assert done.returncode == 1
    assert "did you mean trainer.total_steps?" in done.stderr


def test_a_missing_reward_file_is_found_before_a_process_starts(testchip, tmp_path):
    done = anytron(
        "train",
        EXAMPLE,
        "rewards[0].function=gone.py:f",
        f"trainer.output_dir={tmp_path / 'run'}",
        "platform.name=testchip",
    )

    assert done.returncode == 1
    assert done.stdout.startswith("platform: testchip (asked for by platform.name; the tests brought it)")
    assert "gone.py" in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_worker_names_the_process_and_its_log(testchip, tmp_path, started_warm):
    done = anytron("train", EXAMPLE, "engine.name=refusing", f"trainer.output_dir={tmp_path / 'run'}")

    assert done.returncode == 1
    assert "error: this engine refuses\n  fix: take another\n  process: Trainer rank 0 could not start" in done.stderr
    assert str(tmp_path / "run/logs/trainer-0.log") in done.stderr
    assert "Traceback" not in done.stderr
    assert "DerivedError: this engine refuses" in (tmp_path / "run/logs/trainer-0.log").read_text()


def test_config_show_prints_what_a_run_would_use_and_why_plugins_changed_it(testchip, tmp_path):
    done = anytron("config", "show", EXAMPLE, "trainer.seed=5")

    shown = yaml.safe_load(done.stdout)
    assert (shown["trainer"]["seed"], shown["executor"]["num_threads"], shown["rollout"]["top_p"]) == (5, 1, 1.0)
    assert "testchip sets executor.num_threads to 1: the chip wants no help" in done.stderr
    assert (
        "warning: trainer.seed (command line: trainer.seed=5): this chip ignores it (plugin 'testchip')"
        " - do not rely on it" in done.stderr
    )

    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    assert yaml.safe_load(anytron("config", "show", str(again)).stdout) == shown


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (signal.SIGINT, 130, "resume=auto"),
        pytest.param(signal.SIGTERM, 143, "SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, "SIGHUP", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_processes_and_leaves_nothing_but_the_run(testchip, tmp_path, sent, status, says):
    marker = f"ANYTRON_TEST_MARKER={tmp_path.name}-{os.getpid()}"
    name, value = marker.split("=")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = subprocess.Popen(
        [*COMMAND, "train", EXAMPLE, "engine.name=slow", f"trainer.output_dir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: value, "TMPDIR": str(temporary)},
    )
    deadline = time.monotonic() + 150
    # A log is there a moment before its process.
    while len(list((tmp_path / "run/logs").glob("*.log"))) < 2 or len(running(marker)) < 3:
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.1)
    assert list(temporary.glob("anytron-weights-*"))

    run.send_signal(sent)
    output, errors = run.communicate(timeout=120)

    assert run.returncode == status, errors
    assert says in errors
    assert "Traceback" not in errors
    assert "platform: testchip" in output
    assert running(marker) == []
    assert list(temporary.glob("anytron-weights-*")) == []
    assert (tmp_path / "run/config.yaml").exists()


@pytest.mark.slow
def test_a_reader_that_has_gone_does_not_end_the_run(testchip, tmp_path):
    run = subprocess.Popen(
        [*COMMAND, "train", EXAMPLE, "engine.name=refusing", f"trainer.output_dir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run.stdout.close()

    _, errors = run.communicate(timeout=240)

    assert "the output of the run is lost from here on (Broken pipe); the run goes on" in errors
    assert "error: this engine refuses" in errors  # so far it came
    assert run.returncode == 1


@pytest.mark.parametrize(
    ("limit", "says"), [("RLIMIT_NOFILE", "no file descriptors left"), ("RLIMIT_FSIZE", "allowed size")]
)
def test_what_the_machine_has_run_out_of_is_said_in_four_parts(testchip, tmp_path, limit, says):
    low = {"RLIMIT_NOFILE": 12, "RLIMIT_FSIZE": 1000}[limit]
    code = (
        f"import resource, anytron.cli.main as main, anytron.cli.train, anytron.run.trainer.loop, testchip;"
        f"resource.setrlimit(resource.{limit}, ({low}, {low})); main.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", EXAMPLE, "engine.name=small", f"trainer.output_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert "\n  fix: " in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_modules_are_imported_gives_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    run = subprocess.Popen(
        [sys.executable, "-c", "from anytron.__main__ import main; main()", "train"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "importing\n"

    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=120)

    assert (run.returncode, errors) == (130, "interrupted\n")


def test_a_configuration_with_stages_is_shown_stage_by_stage():
    example = str(ROOT / "examples/sft_then_grpo_sort.yaml")
    done = anytron("config", "show", example, "stages[0].trainer.total_steps=7")
    assert done.returncode == 0, done.stderr
    first, second = yaml.safe_load_all(done.stdout)
    assert "--- # stage sft\n" in done.stdout
    assert [one["algorithm"]["name"] for one in (first, second)] == ["sft", "rl"]
    assert (first["trainer"]["total_steps"], second["trainer"]["total_steps"]) == (7, 400)
    assert [Path(one["trainer"]["output_dir"]).name for one in (first, second)] == ["1-sft", "2-grpo"]


def test_mistakes_of_all_stages_are_told_before_any_is_trained(tmp_path):
    example = str(ROOT / "examples/sft_then_grpo_sort.yaml")
    done = anytron(
        "train",
        example,
        f"trainer.output_dir={tmp_path / 'run'}",
        "stages[0].trainer.save_hf=false",
        "stages[0].rollout={temperature: 0.5}",
        "stages[1].rewards[0].function=nowhere.py:reward",
    )
    assert done.returncode != 0
    assert "trainer.save_hf" in done.stderr
    assert "this stage does not save its model, but the next stage starts from it" in done.stderr
    assert "rollout.temperature" in done.stderr
    assert "it has no effect with algorithm.name=sft: nothing is generated" in done.stderr
    assert "nowhere" in done.stderr
    assert not (tmp_path / "run").exists()
