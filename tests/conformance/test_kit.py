"""The kit itself: a rule fails alone, the smallest case is shown, and nothing is skipped in silence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anytron.base.errors import ConfigError, PlatformError
from anytron.base.results import Result
from anytron.base.traits import ModelTraits
from anytron.cli import check_commands
from anytron.cli.main import app
from anytron.device.loading import hooks_of
from anytron.device.loading.session import Session
from anytron.device.platform import Feature, Limit
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionSpec
from anytron.proof.checks import Inapplicable, Report, Watcher
from anytron_conformance import document
from anytron_conformance import run as run_module
from anytron_conformance.rules import LEVELS, PAGE, TITLE, Broken, Case, checked_levels, find_rule, rule, rules_of
from anytron_conformance.run import Checker, run, run_conformance
from anytron_conformance.subject import Source, Subject
from anytron_conformance.worker import check_rule
from anytron_cpu import CpuPlatform
from tests.conformance.device_mutants import with_runtime
from tests.conformance.kernel_mutant import KernelMutant
from tests.conformance.mutant import Mutant
from tests.core.other_environment import make_environment
from tests.docs.test_pages import ROOT


class Misbehaves(Mutant):
    """Its seed kills the process, its generator hangs, its memory raises; its dtypes are right."""

    runtime = with_runtime(
        manual_seed=lambda self, seed: os._exit(3),
        default_generator=lambda self: time.sleep(600),
        memory_stats=lambda self: 1 // 0,
    )


class Declines:
    """A subject that declares things."""

    hooks = hooks_of()

    def __init__(self, **reasons):
        self.reasons = reasons

    def declined(self, features):
        return next((self.reasons[feature.name] for feature in features if feature.name in self.reasons), None)


def title(name):
    """A rule's name without its level."""
    return name.partition(".")[2]


def made_rule(check, **options):
    """A rule that the kit does not have."""
    return rule("made", options.pop("level", "device"), "It is made.", **options)(check)


def test_what_kills_hangs_or_raises_fails_alone(tmp_path, offer):
    name = offer(Misbehaves.name, f"{__name__}:Misbehaves")
    names = ("seeds-decide", "own-generator", "memory-figures", "dtypes-compute")
    rules = [find_rule("device", one) for one in names]
    rules[0] = replace(rules[0], limit_s=20.0)
    rules[1] = replace(rules[1], limit_s=3.0)
    with Checker(Source(name), tmp_path) as checker:
        dead, late, raised, right = (checker.check(one) for one in rules)
    assert (dead.status, dead.broken) == ("failed", "rand"), dead.explanation
    assert "exited with status 3" in dead.detail
    assert late.detail.startswith("The check did not end within 3 s")
    assert "in own_generator" in late.detail, "the place where it hangs is shown"
    assert "ZeroDivisionError" in raised.detail
    assert "test_kit.py" in raised.detail, "the platform's line is shown"
    assert right.status == "passed"


class WithoutCollectives(Mutant):
    """Its library of collectives cannot be loaded, so that no rank comes up."""

    runtime = with_runtime(communication_backend="acmeccl")


def test_ranks_that_do_not_come_up_are_every_rule_s_own_failure(tmp_path, offer):
    name = offer(WithoutCollectives.name, f"{__name__}:WithoutCollectives")
    with Checker(Source(name), tmp_path) as checker:
        for rule_name in ("environment-reaches-ranks", "collective-results"):
            result = checker.check(find_rule("device", rule_name))
            assert result.status == "failed"
            assert "acmeccl" in result.detail, "and not that processes are gone"


def test_the_smallest_case_that_fails_is_shown():
    tried = []

    def check(subject, case):
        tried.append(case.name)
        if case.values >= 3:
            raise Broken("Too many.", "3, allowed 2")

    cases = [Case(str(number), number, number) for number in (9, 3, 1, 5)]
    result = check_rule(made_rule(check, cases=cases), Declines())
    assert tried == ["1", "3"]
    assert (result.broken, result.detail, result.notes["difference"]) == ("3", "Too many.", "3, allowed 2")
    assert result.cases == 2


def test_what_is_declared_or_impossible_is_counted():
    cases = [Case("b", needs=(Feature.BSHD,)), Case("a"), Case("c")]

    def check(subject, case):
        if case.name == "c":
            raise Inapplicable("one device only")

    result = check_rule(made_rule(check, cases=cases), Declines(BSHD="no rows"))
    assert Result(**json.loads(json.dumps(result.as_json()))) == result
    assert (result.status, result.made, [*result.left_out]) == ("passed", ["a"], ["b", "c"])
    assert result.detail == "no rows; one device only"
    whole = check_rule(made_rule(check, needs=[Feature.BSHD]), Declines(BSHD="no rows"))
    assert (whole.status, whole.cases, whole.detail) == ("skipped", 0, "no rows")
    assert Report([result, whole]).counts["cases_skipped"] == 3


def test_no_case_is_no_pass():
    assert check_rule(made_rule(lambda *_: None, cases=[]), Declines()).status == "skipped"


class NoContext(Mutant):
    def limits(self):
        return [Limit(Feature.CONTEXT_PARALLEL, "the ring is not written yet")]


def test_a_declared_limit_is_a_skip_with_its_reason(tmp_path, offer):
    name = offer(NoContext.name, f"{__name__}:NoContext")
    with Checker(Source(name), tmp_path) as checker:
        result = checker.check(find_rule("sequences", "context-parallel-outputs"))
        partly = checker.check(find_rule("sequences", "constraints-are-fixed"))
    reason = f"{name} does not support context-parallel: the ring is not written yet"
    assert (result.status, result.detail) == ("skipped", reason)
    assert (partly.status, partly.detail, partly.cases, len(partly.left_out)) == ("passed", reason, 24, 24)


def test_the_sample_keeps_the_rules(tmp_path, offer):
    name = offer("basalt", "anytron_basalt:BasaltPlatform")
    results = run(Source(name), ("device", "sequences"), tmp_path, Watcher())
    failed = [result.explanation for result in results if result.status == "failed"]
    assert failed == []
    skipped = {title(result.name) for result in results if result.status == "skipped"}
    by_declaration = {"own-device", "own-operators"}
    by_machine = {"peak-memory", "streams-order-work", "pinned-memory"}
    of_two_devices = {
        "environment-reaches-ranks",
        "ranks-own-devices",
        "collective-results",
        "context-parallel-outputs",
    }
    assert skipped == by_declaration | by_machine | of_two_devices


def test_the_processor_keeps_the_rules_and_the_command_says_so(offer):
    done = CliRunner().invoke(app, ["conformance", "cpu", "--level", "device", "--level", "sequences", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [*found] == ["platform", "versions", "results", "counts", "interrupted"]
    assert found["interrupted"] is False
    rules = found["results"]
    assert [level for level, _ in groupby(rules, lambda one: one["name"].partition(".")[0])] == ["device", "sequences"]
    assert all(one.keys() == {field.name for field in fields(Result)} for one in rules)
    assert all(one["notes"].keys() == {"contract", "docs"} for one in rules)
    assert found["counts"]["passed"] + found["counts"]["skipped"] == len(rules)
    skipped = {title(one["name"]) for one in rules if one["status"] == "skipped"}
    assert skipped == {"peak-memory", "streams-order-work", "pinned-memory", "patches-take-effect"}


def test_the_command_fails_if_a_rule_is_broken(offer):
    name = offer(
        NoContext.name.replace("nocontext", "silentfallback"), "tests.conformance.device_mutants:SilentFallback"
    )
    done = CliRunner().invoke(app, ["conformance", name, "--level", "device"])
    assert done.exit_code == 1
    assert "device.own-device failed\nThe platform says that it is an accelerator" in done.stdout
    assert f"docs: the page '{TITLE}', section own-device ({PAGE}#own-device in the source" in done.stdout
    told = " ".join(find_rule("device", "own-device").help.replace("``", "`").split())
    assert f"checked: {told}" in done.stdout, "all that the page says, where only a wheel is installed"


def test_unknown_names_are_refused_with_the_nearest(offer):
    offer("basalt", "anytron_basalt:BasaltPlatform")
    for arguments, error in ((["basal"], PlatformError), (["cpu", "--level", "kernel"], ConfigError)):
        done = CliRunner().invoke(app, ["conformance", *arguments])
        assert isinstance(done.exception, error)
        assert done.exception.fix.startswith("did you mean ")


@pytest.mark.parametrize("as_json", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["table", "json"])
def test_what_was_checked_before_ctrl_c_is_shown_and_no_process_stays(started_cold, tmp_path, as_json):
    command = [sys.executable, "-m", "anytron", "conformance", "cpu", "--level", "device", *["--json"] * as_json]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        said = [next(process.stderr), next(process.stderr)]  # the platform, and the first rule
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert said[1].startswith("device.probe-and-runtime: passed")
    if as_json:
        found = json.loads(output)
        assert found["interrupted"] is True
        assert found["platform"] == "cpu"
        assert found["results"][0]["name"] == "device.probe-and-runtime"
        assert found["counts"]["passed"] >= 1
    else:
        assert re.search(r"^passed +probe-and-runtime +", output, re.MULTILINE)
    assert "collective-results" not in output
    assert "interrupted: the other rules were not checked" in errors
    assert children
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


class AnswersNothing(Mutant):
    """Its runtime answers None where the contract has an object."""

    runtime = with_runtime(current_device=lambda self: None, default_generator=lambda self: "mine")


class AssertsWithoutWords(Mutant):
    def runtime(self):
        assert self.name == "another"


def test_what_a_platform_answers_or_asserts_is_told_in_words(tmp_path):
    told = {}
    for platform in (AnswersNothing(), AssertsWithoutWords()):
        session = Session(hooks_of(platform), platform, platform.probe(), "", (), ())
        for name in ("probe-and-runtime", "own-generator"):
            result = check_rule(find_rule("device", name), Subject(Source(platform.name), session, tmp_path))
            told[platform.name, name] = result.detail
    assert [*told.values()][:2] == [
        "current_device() does not return a torch.device.",
        "default_generator() does not return a torch.Generator.",
    ]
    for reason in [*told.values()][2:]:
        assert "at 'assert self.name == \"another\"' (" in reason


class OwnAttention(KernelMutant):
    """Has attention of its own, which is torch's too, and no other kernel."""

    def attention(self, spec):
        return make_attention(spec)


@pytest.mark.parametrize("platform", [OwnAttention(), KernelMutant()], ids=lambda one: type(one).__name__)
def test_a_failure_names_the_kernels_that_are_not_the_platform_s(platform, tmp_path):
    session = Session(hooks_of(platform), platform, platform.probe(), "", (), ())
    subject = Subject(Source(platform.name), session, tmp_path)

    def fails(subject, case):
        subject.hooks.attention_kernel(AttentionSpec(2, 2, 16, 16, 1.0, ModelTraits()))
        raise Broken("The output is wrong.")

    result = check_rule(made_rule(fails, level="kernels"), subject)
    own = isinstance(platform, OwnAttention)
    assert ("attention_kernel of 'neutral-default'" in result.explanation) is not own
    later = check_rule(made_rule(lambda subject, case: 1 // 0, level="kernels"), subject)
    assert "neutral" not in later.explanation, "the kernel that an earlier rule called is not named"
    mask = check_rule(made_rule(fails, level="sequences"), subject)
    assert "neutral" not in mask.explanation, "there the platform's masks are checked"


def test_before_any_rule_ctrl_c_gives_an_empty_report(monkeypatch, capsys):
    def interrupted(level):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "rules_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_conformance("cpu", [], ["device"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["results"], found["interrupted"]) == ([], True)


def test_without_the_kit_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(check_commands, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["conformance", "cpu"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.what == "The conformance kit is not installed."
    assert done.exception.where
    assert done.exception.why
    assert done.exception.fix == 'pip install "anytron[conformance]"'


def test_without_torch_it_says_what_to_install(tmp_path):
    python = make_environment(tmp_path / "environment", anytron=None)
    (site,) = (tmp_path / "environment").glob("lib/python3*/site-packages")
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in [Path(path) for path in sys.path if Path(path).is_dir() and "-packages" in path]:
        for one in place.iterdir():
            name = re.split(r"[-.]", one.name)[0]
            if name not in ("torch", "__pycache__", "sitecustomize") and not (packages / one.name).exists():
                (packages / one.name).symlink_to(one)
    sources = [ROOT / "core", ROOT / "backends", ROOT / "plugins" / "cpu"]
    (site / "tests.pth").write_text("\n".join(str(path) for path in (packages, *sources)))
    command = [python, "-m", "anytron", "conformance", "cpu", "--level", "device"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    *_, what, where, why, fix = done.stderr.splitlines()
    assert what == "error: The package torch is not installed."
    assert where == f"  where: {tmp_path / 'environment'}"
    assert why.startswith("  why: anytron needs torch>=")
    assert fix.startswith("  fix: pip install 'torch>=")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("anytron-")] == []


def test_a_mistake_is_told_before_torch_is_imported(started_cold):
    program = (
        "import sys\nfrom anytron.base.errors import AnytronError\n"
        "from anytron_conformance.run import run_conformance\n"
        "try:\n    run_conformance(sys.argv[1], [], sys.argv[2:], as_json=False)\n"
        "except AnytronError as error:\n    print(error.what, 'torch' in sys.modules)"
    )
    for arguments, what in (("acme", "Platform 'acme' is not installed."), ("cpu all", "Level 'all' does not exist.")):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments.split()], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == f"{what} False\n", done.stderr


def test_levels_come_in_their_order():
    assert checked_levels(["sequences", "device"]) == ("device", "sequences")
    assert checked_levels([]) == LEVELS


def test_a_report_counts():
    results = [check_rule(made_rule(lambda *_: None), Declines()), check_rule(made_rule(lambda *_: 1 // 0), Declines())]
    report = Report(results)
    assert not report.passed
    assert report.counts == {"skipped": 0, "passed": 1, "warning": 0, "failed": 1, "cases": 2, "cases_skipped": 0}


def test_every_rule_has_a_name_of_its_own_and_a_section():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    rules = [rule for level in LEVELS for rule in rules_of(level)]
    assert len({rule.title for rule in rules}) == len(rules)
    for one in rules:
        assert f"\n### {one.title}\n" in page
        assert one.help, one.name
    assert page.splitlines()[2] == f"# {TITLE}"
    assert f"- {TITLE}: reference/conformance.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert document.render() == page, "run python -m anytron_conformance.document docs/reference/conformance.md"


def test_it_is_three_lines_in_a_suite(pytester_run):
    output = pytester_run(
        "from anytron_conformance import conformance\n\ntest_conformance = conformance('basalt', level='device')\n"
    )
    assert "test_conformance[device.rng-round-trip] PASSED" in output
    assert "basalt does not support own-device: the simulator computes on the host's processor" in output
    assert "failed" not in output


@pytest.fixture
def pytester_run(offer, tmp_path):
    """Run pytest on a file, in a process of its own, where the sample is installed."""
    offer("basalt", "anytron_basalt:BasaltPlatform")

    def ran(source):
        (tmp_path / "test_sample.py").write_text(source)
        program = f"import sys, pytest; sys.path[:0] = {sys.path!r}; sys.exit(pytest.main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "-v", "-rs", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        return subprocess.run(
            [*command, str(tmp_path / "test_sample.py")], capture_output=True, text=True, timeout=300, check=False
        ).stdout

    return ran


def test_the_processor_declares_nothing():
    assert list(CpuPlatform().limits()) == []
