"""Twins of files, checkpoints, reports, configurations and terminals."""

from __future__ import annotations

from tests.docs.twins.twin import Twin

OTHERS = (
    Twin(
        "tests/backends/megatron/test_malformed_models.py::test_a_malformed_directory_is_refused_in_words_or_trains",
        "core/anytron/config/json_files.py",
        "    except RecursionError:\n",
        "    except FloatingPointError:\n",
    ),
    Twin(
        "tests/backends/megatron/test_model_code.py::test_a_configuration_cannot_ask_for_it",
        "core/anytron/config/section.py",
        'extra="forbid"',
        'extra="ignore"',
    ),
    Twin(
        "tests/backends/megatron/test_mutated_models.py::test_a_mutated_directory_is_refused_in_words_or_trains",
        "core/anytron/base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"',
        "lambda found: found[0]",
    ),
    Twin(
        "tests/core/cli/test_main.py::test_the_current_directory_shadows_nothing",
        "core/anytron/__main__.py",
        "        del sys.path[0]\n",
        "        pass\n",
    ),
    Twin(
        "tests/core/cli/test_main.py::test_what_the_machine_has_run_out_of_is_said_in_four_parts",
        "core/anytron/base/files.py",
        "    errno.EMFILE: (",
        "    errno.EXFULL: (",
    ),
    Twin(
        "tests/core/cli/test_report_command.py::test_a_report_is_one_private_file_and_is_written_again",
        "core/anytron/base/files.py",
        "PRIVATE = 0o600",
        "PRIVATE = 0o644",
    ),
    Twin(
        "tests/core/cli/test_terminal.py::test_no_command_obeys_what_it_reads",
        "core/anytron/base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"',
        "lambda found: found[0]",
    ),
    Twin(
        "tests/core/cli/test_terminal.py::test_nor_does_a_console",
        "core/anytron/base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"',
        "lambda found: found[0]",
    ),
    Twin(
        "tests/core/cli/test_terminal.py::test_nor_does_anything_else_that_a_process_writes",
        "core/anytron/base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"',
        "lambda found: found[0]",
    ),
    Twin(
        "tests/core/config/test_hostile_files.py::test_whatever_stands_in_the_file_is_refused_in_words",
        "core/anytron/config/load.py",
        "    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:",
        "    except yaml.YAMLError as error:",
    ),
    Twin(
        "tests/core/config/test_json_files.py::test_every_reader_says_it_with_the_name_of_the_file",
        "core/anytron/config/json_files.py",
        "    except RecursionError:\n",
        "    except FloatingPointError:\n",
    ),
    Twin(
        "tests/core/config/test_json_files.py::test_that_no_file_can_be_opened_is_not_that_one_is_missing",
        "core/anytron/base/files.py",
        "    errno.EMFILE: (",
        "    errno.EXFULL: (",
    ),
    Twin(
        "tests/core/config/test_load.py::test_no_value_of_the_environment_reaches_what_others_can_read",
        "core/anytron/config/load.py",
        "        if PUBLIC.search(key):\n",
        "        if PUBLIC.fullmatch(key) and False:\n",
    ),
    Twin(
        "tests/core/record/checkpoint/test_directory.py::test_the_drivers_state_holds_the_configuration_and_is_private",
        "core/anytron/base/files.py",
        "PRIVATE = 0o600",
        "PRIVATE = 0o644",
    ),
    Twin(
        "tests/core/record/checkpoint/test_manifest.py::test_a_good_checkpoint_that_cannot_be_read_now_is_not_set_aside",
        "core/anytron/record/checkpoint/manifest.py",
        "        raise _unreadable(directory / name, error) from error\n",
        '        sizes = [f"{name} cannot be read: {error}"]\n',
    ),
    Twin(
        "tests/core/record/checkpoint/test_manifest.py::test_a_link_is_not_a_file_of_the_checkpoint",
        "core/anytron/record/checkpoint/manifest.py",
        "if not path.is_file() or path.is_symlink():\n        yield",
        "if not path.is_file():\n        yield",
    ),
    Twin(
        "tests/core/record/checkpoint/test_manifest.py::test_what_has_changed_is_named",
        "core/anytron/record/checkpoint/manifest.py",
        "if not found and FileRecord.of(directory / name) != record:",
        "if False:",
    ),
    Twin(
        "tests/core/record/report/test_choosing.py::test_a_picture_elsewhere_is_not_named",
        "core/anytron/record/report/samples.py",
        "isinstance(name, str) and _PICTURE.fullmatch(name)]",
        "isinstance(name, str)]",
    ),
    Twin(
        "tests/core/record/report/test_choosing.py::test_nothing_that_is_shown_moves_the_cursor",
        "core/anytron/base/terminal.py",
        'lambda found: " " if found[0] == "\\t" else f"\\\\x{ord(found[0]):02x}"',
        "lambda found: found[0]",
    ),
    Twin(
        "tests/core/record/report/test_page.py::test_nothing_hostile_becomes_an_element",
        "core/anytron/record/report/page.py",
        '.replace("<", "\\\\u003c")',
        "",
    ),
    Twin(
        "tests/core/record/report/test_page.py::test_nothing_is_loaded_and_nothing_else_may_run",
        "core/anytron/record/report/page.py",
        '"SCRIPT-HASH": _hash(script)',
        '"SCRIPT-HASH": "\'unsafe-inline\'"',
    ),
    Twin(
        "tests/core/record/tracking/test_claim.py::test_a_planted_link_is_not_followed",
        "core/anytron/base/files.py",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)",
        "os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)",
    ),
    Twin(
        "tests/core/record/tracking/test_claim.py::test_two_runs_do_not_write_into_one_directory",
        "core/anytron/base/files.py",
        "fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
    ),
    Twin(
        "tests/core/record/tracking/test_claim.py::test_what_no_run_has_written_is_not_touched",
        "core/anytron/record/tracking/claim.py",
        "if present and self.record is None:",
        "if False:",
    ),
    Twin(
        "tests/core/record/tracking/test_run_directory.py::test_configurations_may_hold_secrets_and_are_private",
        "core/anytron/base/files.py",
        "PRIVATE = 0o600",
        "PRIVATE = 0o644",
    ),
    Twin(
        "tests/core/run/trainer/test_lost_directory.py::test_another_run_that_claims_the_directory_is_left_alone",
        "core/anytron/record/tracking/claim.py",
        "if why := lock.lost():",
        'if why := "":',
    ),
    Twin(
        "tests/core/run/trainer/test_lost_directory.py::test_it_is_found_within_a_step_and_the_run_goes_on_elsewhere",
        "core/anytron/record/tracking/run_directory.py",
        "if (found := self.lost()) is not None:",
        "if (found := None) is not None:",
    ),
    Twin(
        "tests/core/run/trainer/test_private_files.py::test_no_file_that_others_can_read_has_a_secret",
        "core/anytron/base/files.py",
        "PRIVATE = 0o600",
        "PRIVATE = 0o644",
    ),
    Twin(
        "tests/core/task/rewards/test_processes.py::test_no_log_is_written_through_a_link_or_emptied",
        "core/anytron/base/files.py",
        "os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)",
        "os.O_APPEND | os.O_CLOEXEC, 0o666)",
    ),
    Twin(
        "tests/core/workers/executor/test_failures.py::test_no_log_is_written_through_a_link",
        "core/anytron/base/files.py",
        "os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)",
        "os.O_APPEND | os.O_CLOEXEC, 0o666)",
    ),
)
