"""What SECURITY.md promises, broken on purpose: each twin takes one border away, and the row's test must notice.

    python -m tests.docs.twins [WORD ...]

runs those whose test has one of the words in its name, or all of them, and ends with status 1 if a test passes without
its border.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.house import ROOT

CORE = ROOT / "core" / "anytron"


class Twin(NamedTuple):
    """A sabotage.

    Attributes:
        test: Which must fail with it, as SECURITY.md names it.
        file: Below ``core/anytron``.
        whole: What stands there, once.
        broken: What stands there in the twin.
    """

    test: str
    file: str
    whole: str
    broken: str


_STREAM = "tests/core/workers/weights/test_stream.py::test_"
_STRANGERS = "tests/core/workers/weights/test_strangers.py::test_"
_UNPROVED = (
    "workers/weights/secret.py",
    "if not hmac.compare_digest(proof, _proof(secret, side, challenges)):",
    "if len(proof) != len(_proof(secret, side, challenges)):",
)
_PRIVATE = ("base/files.py", "PRIVATE = 0o600", "PRIVATE = 0o644")
_READER = "tests/core/task/isolation/test_reader.py::test_"
TWINS = [
    Twin(
        f"{_READER}whatever_happens_is_an_error_in_words_and_the_next_call_is_answered", "task/isolation/reader.py",
        "except BaseException as error:  # noqa: BLE001 - a library's panic is no Exception",
        "except ValueError as error:",
    ),
    Twin(
        f"{_READER}it_has_no_open_file_of_the_drivers", "task/isolation/reader.py",
        "os.closerange(5, _ANY_FILE)", "os.closerange(5, 5)",
    ),
    Twin(
        f"{_READER}a_machine_that_cannot_confine_reads_nothing", "task/isolation/reader.py",
        "if unconfined:", "if not service:",
    ),
    Twin(f"{_STRANGERS}a_reader_with_another_secret_is_refused_and_the_right_one_gets_its_weights", *_UNPROVED),
    Twin(f"{_STRANGERS}a_reader_does_not_take_weights_from_another_sender", *_UNPROVED),
    Twin(
        f"{_STRANGERS}a_recorded_proof_proves_nothing_again", "workers/weights/secret.py",
        "self.text = secrets.token_bytes(_CHALLENGE_BYTES)",
        "self.text = bytes(_CHALLENGE_BYTES)",
    ),
    Twin(
        f"{_STRANGERS}a_proof_has_one_deadline_however_slowly_its_bytes_come", "workers/weights/network.py",
        "time.monotonic() + PROOF_S)", "time.monotonic() + 1e6)",
    ),
    Twin(
        f"{_STREAM}rank_0_and_the_driver_listen_where_they_are_told_and_only_while_it_is_needed",
        "workers/weights/network.py", "create_server((address, 0),", 'create_server(("", 0),',
    ),
    Twin("tests/core/record/tracking/test_run_directory.py::test_configurations_may_hold_secrets_and_are_private",
    *_PRIVATE), Twin(
        "tests/core/record/checkpoint/test_directory.py::test_the_drivers_state_holds_the_configuration_and_is_private",
        *_PRIVATE,
    ),
    Twin(
        "tests/core/cli/test_report_command.py::test_a_report_is_one_private_file_and_is_written_again", *_PRIVATE
    ),
    Twin(
        "tests/core/record/checkpoint/test_manifest.py::test_a_link_is_not_a_file_of_the_checkpoint",
        "record/checkpoint/manifest.py", "if not path.is_file() or path.is_symlink():\n        yield",
        "if not path.is_file():\n        yield",
    ),
    Twin(
        "tests/core/task/data/test_sources.py::test_a_path_that_leaves_the_folder_is_refused", "task/data/records.py",
        "leaves = not file.resolve().is_relative_to(folder.resolve())", "leaves = False",
    ),
    Twin(
        "tests/core/task/data/test_rows.py::test_an_enormous_line_is_refused_before_it_is_in_memory",
        "task/data/rows.py",
        "stream.readline(LONGEST_LINE + 1):", "stream.readline():",
    ),
    Twin(
        "tests/core/cli/test_main.py::test_the_current_directory_shadows_nothing", "__main__.py",
        "        del sys.path[0]\n", "        pass\n",
    ),
    Twin(
        "tests/core/workers/executor/test_local.py::test_a_worker_is_built_in_order_and_told_who_it_is",
        "workers/executor/process.py",
        "sys.path[:] = filter(None, sys.path); ", "",
    ),
    Twin(
        "tests/core/cli/test_terminal.py::test_nor_does_a_console", "base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"', "lambda found: found[0]",
    ),
    Twin(
        "tests/core/record/report/test_choosing.py::test_nothing_that_is_shown_moves_the_cursor", "base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"', "lambda found: found[0]",
    ),
    Twin(
        "tests/core/record/report/test_choosing.py::test_a_picture_elsewhere_is_not_named", "record/report/samples.py",
        "isinstance(name, str) and _PICTURE.fullmatch(name)]", "isinstance(name, str)]",
    ),
    Twin(
        "tests/core/workers/executor/test_failures.py::test_no_log_is_written_through_a_link", "base/files.py",
        "os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)", "os.O_APPEND | os.O_CLOEXEC, 0o666)",
    ),
    Twin(
        "tests/core/task/rewards/test_processes.py::test_no_log_is_written_through_a_link_or_emptied", "base/files.py",
        "os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)", "os.O_APPEND | os.O_CLOEXEC, 0o666)",
    ),
    Twin(
        "tests/core/task/isolation/test_sandbox.py::test_it_sees_no_secret_and_no_open_file",
        "task/isolation/sandbox.py",
        "os.execve(python, [python, *options, \"-c\", _PROGRAM], environment)",
        "os.execve(python, [python, *options, \"-c\", _PROGRAM], {**os.environ, **environment})",
    ),
    Twin(
        "tests/core/workers/executor/test_local.py::test_collectives_work_and_listen_on_the_loopback_interface_alone",
        "workers/executor/environment.py",
        "return {} if interface is None else dict.fromkeys(names, interface)", "return {}",
    ),
    Twin(
        "tests/core/config/test_json_files.py::test_every_reader_says_it_with_the_name_of_the_file",
        "config/json_files.py", "    except RecursionError:\n", "    except FloatingPointError:\n",
    ),
    Twin(
        "tests/core/config/test_json_files.py::test_that_no_file_can_be_opened_is_not_that_one_is_missing",
        "base/files.py",
        "    errno.EMFILE: (", "    errno.EXFULL: (",
    ),
    Twin(
        "tests/core/record/checkpoint/test_manifest.py::test_a_good_checkpoint_that_cannot_be_read_now_is_not_set_aside",
        "record/checkpoint/manifest.py", "        raise _unreadable(directory / name, error) from error\n",
        '        sizes = [f"{name} cannot be read: {error}"]\n',
    ),
    Twin(
        "tests/core/config/test_load.py::test_no_value_of_the_environment_reaches_what_others_can_read",
        "config/load.py", "        if PUBLIC.search(key):\n", "        if PUBLIC.fullmatch(key) and False:\n",
    ),
]  # fmt: skip


def broken(twin: Twin, folder: Path) -> None:
    """Write a copy of the core that lacks what the twin takes away."""
    shutil.copytree(CORE, folder / "anytron", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "anytron" / twin.file
    text = file.read_text("utf-8")
    file.write_text(text.replace(twin.whole, twin.broken), "utf-8")


def notices(twin: Twin) -> bool:
    """Whether the test fails with the twin."""
    with tempfile.TemporaryDirectory(prefix="anytron-twin-") as folder:
        broken(twin, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", twin.test],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    return done.returncode == 1


def main() -> None:
    """Run twins and say of each whether its test notices."""
    blind = 0
    for twin in TWINS:
        if sys.argv[1:] and not any(word in twin.test for word in sys.argv[1:]):
            continue
        found = notices(twin)
        blind += not found
        print("noticed" if found else "NOT NOTICED", twin.test, flush=True)
    sys.exit(min(blind, 1))


if __name__ == "__main__":
    main()
