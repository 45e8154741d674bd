"""The run: its table of steps, their limits, and the results."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.core.workers.executor.processes import wait_until_gone
from tests.house import ROOT


@pytest.fixture
def start(load, tmp_path):
    """Do one step that runs a line of Python; return its outcome and the results."""
    run, steps, results = map(load, ("run", "steps", "results"))
    environment = SimpleNamespace(python=sys.executable, variables=lambda work, platform: {"WHERE": platform})

    def go(line, *, limit_s=60, left_s=60.0, read=steps.Step.read):
        found = results.Results(tmp_path / "work", tmp_path / "out", ["prepare", "one"])
        step = steps.Step("one", "a line", limit_s, ("-c", line, "{folder}"), on_cpu=("dry",), read=read)
        arguments = SimpleNamespace(work=tmp_path / "work", dry_run=False)
        run.do(step, arguments, environment, found, left_s)
        found.write()
        return found.steps["one"], found

    return go


def test_the_table_can_be_carried_out(load):
    run, steps = load("run"), load("steps")
    assert len({step.name for step in steps.STEPS}) == len(steps.STEPS)
    assert [step.name for step in steps.STEPS][:3] == ["tests", "train_step", "grpo_sort"]
    for step in steps.STEPS:
        assert step.limit_s <= 200
        assert step.what
        for dry_run in (False, True):
            words = run.command_of(step, ROOT / "x", dry_run=dry_run)
            assert not any("{" in word for word in words)
            if step.script is not None and (ROOT / step.script).exists():
                source = (ROOT / step.script).read_text()
                assert all(f'"{word}"' in source for word in words[2:] if word.startswith("--"))
    gpu_tests = run.gpu_tests()
    assert "tests/plugins/cuda/test_cuda_platform.py" in gpu_tests
    assert all((ROOT / path).is_file() for path in gpu_tests)


def test_the_page_lists_the_steps(load):
    page = (ROOT / "benchmarks" / "on_a_gpu" / "README.md").read_text()
    for step in load("steps").STEPS:
        assert f"| `{step.name}` | {step.limit_s} s |" in page


def test_what_a_step_prints_and_takes_is_kept(start):
    outcome, results = start(
        "import json, time; time.sleep(0.2)\nprint('noise'); print(json.dumps({'figures': {'ratio': 2.5}}, indent=1))"
    )
    assert (outcome["status"], outcome["exit"]) == ("passed", 0)
    assert outcome["figures"] == {"figures": {"ratio": 2.5}}
    assert 0.2 <= outcome["seconds"] < 60  # rounded to a tenth
    assert "one.ratio" not in results.facts
    written = json.loads((results._out / "results.json").read_text())
    assert next(iter(written.items())) == ("headlines", {"one.ratio": 2.5})
    assert written["steps"]["one"]["command"][0] == sys.executable
    assert "ratio" in (results._out / "summary.txt").read_text()
    assert "noise" in (results._out / "logs.txt").read_text()


@pytest.mark.parametrize("before", ["", "[rank0]: a warning\n{'no': JSON}\n[1] is no value of a whole line\n"])
@pytest.mark.parametrize(
    "after", ["", "\n[rank0]:[W1 ProcessGroupNCCL.cpp] destroy_process_group() was not called\n{\n"]
)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [{"figures": {"ratio": 2.5, "rows": {"a": [1]}}}, [{"check": "a"}, {"check": "b"}]])
def test_what_libraries_print_before_and_after_the_figures_is_no_matter(load, before, after, indent, value):
    figures = load("figures")
    output = f"{before}{json.dumps({'earlier': 1})}\n{json.dumps(value, indent=indent)}\n{after}"
    assert figures.printed(None, output) == value
    with pytest.raises(ValueError, match="no JSON value"):
        figures.last_json(before + after)


@pytest.fixture
def prepared(load, monkeypatch, tmp_path):
    """Prepare with another probe; say whether steps can run, and give the results."""
    run, image, results = map(load, ("run", "image", "results"))

    def go(probe, *, limit_s=60):
        (tmp_path / "probe.py").write_text(probe)
        monkeypatch.setattr(image, "PROBE", tmp_path / "probe.py")
        monkeypatch.setattr(run, "PROBE_S", limit_s)
        monkeypatch.setattr(run, "prepare", lambda *_: {"lacking": []})
        environment = SimpleNamespace(python=sys.executable, variables=lambda work, platform: {})
        found = results.Results(tmp_path / "work", tmp_path / "out", run.ORDER)
        return run.prepared(SimpleNamespace(work=tmp_path, dry_run=False), environment, found), found

    return go


@pytest.mark.parametrize(
    ("end", "limit_s", "how"),
    [
        ("print('goodbye')", 60, None),
        ("import os; os.abort()", 60, "the probe ended with status -6"),
        ("import time; time.sleep(60)", 2, "the probe took more than 2 s"),
    ],
)
def test_a_library_that_ends_the_probe_does_not_end_the_run(prepared, end, limit_s, how):
    facts = {"devices": [{"name": "H200"}], "versions": {"torch": "2.13"}}
    passed, found = prepared(f"print('hello')\nprint({json.dumps(facts)!r}, flush=True)\n{end}", limit_s=limit_s)
    assert passed
    assert found.facts["machine"] == facts
    remark = found.steps["prepare"].get("remark")
    assert remark == (how and f"not every library was looked at: {how}; logs.txt may say why")


def test_a_probe_that_says_nothing_ends_the_run(prepared):
    passed, found = prepared("raise OSError('libcudart.so: cannot open shared object file')")
    assert not passed
    assert found.steps["prepare"]["error"] == "torch cannot be used: the probe ended with status 1"
    assert "libcudart" in found.summary()


def test_products_in_float32_are_not_rounded_where_an_image_wants_that(load, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    variables = load("image").Environment(tmp_path / "environment").variables(tmp_path, "cuda")
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in variables
    assert variables["NCCL_DEBUG"] == "WARN"


def test_a_step_that_fails_says_how_its_log_ends(start):
    outcome, results = start("import sys; sys.exit('out of memory')")
    assert (outcome["status"], outcome["exit"]) == ("failed", 1)
    assert outcome["end_of_log"].endswith("out of memory")
    assert results.summary().endswith("out of memory")


def test_a_step_without_figures_has_failed(start):
    outcome, _ = start("print('hello')")
    assert (outcome["status"], outcome["error"]) == ("failed", "no figures: ValueError: no JSON value was printed")


@pytest.mark.parametrize("limits", [{"limit_s": 2}, {"left_s": 2.0}])
def test_a_step_and_its_children_end_with_its_time(start, limits, tmp_path):
    written = tmp_path / "child"
    child = f"import os, pathlib, time; pathlib.Path({str(written)!r}).write_text(str(os.getpid())); time.sleep(600)"
    outcome, _ = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()", **limits)
    assert (outcome["status"], outcome["limit_s"]) == ("timed out", 2)
    assert wait_until_gone([int(written.read_text())])


def test_figures_of_a_step_that_was_ended_are_kept(start):
    line = 'import time; print(\'{"figures": {"steps": 7}}\', flush=True); time.sleep(60)'
    outcome, _ = start(line, limit_s=2)
    assert (outcome["status"], outcome["figures"]) == ("timed out", {"figures": {"steps": 7}})


def test_a_later_call_continues(start, load, tmp_path):
    start("print('{}')")
    run, results = load("run"), load("results")
    found = results.Results(tmp_path / "work", tmp_path / "other", ["prepare", "one"])
    assert found.steps["one"]["status"] == "passed"
    found.steps |= {"tests": {"status": "passed"}, "attention": {"status": "timed out"}}
    rest = [step.name for step in run.selected(run.arguments_of(["--rest"]), found)]
    assert "tests" not in rest
    assert "attention" in rest
    only = run.selected(run.arguments_of(["--only", "attention,tests"]), found)
    assert [step.name for step in only] == ["tests", "attention"]
    with pytest.raises(SystemExit):
        run.arguments_of(["--only", "atention"])


def test_results_go_where_they_are_asked_for(load, monkeypatch, tmp_path):
    run = load("run")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert run.arguments_of([]).out == tmp_path
    assert run.arguments_of(["--out", str(tmp_path / "there")]).out == tmp_path / "there"
    assert run.arguments_of(["--dry-run"]).out == ROOT / "build" / "on_a_gpu" / "dry" / "out"
    assert run.arguments_of([]).minutes < 10


def test_figures_of_a_run_that_was_cut_short(load, tmp_path):
    record = dict.fromkeys(("time/step_s", "time/rollout_s", "time/score_s", "time/update_s", "time/sync_s"), 1.0)
    record |= {"rollout/log_prob_abs_diff": 1e-7}
    lines = [json.dumps({**record, "reward/mean": step / 20}) for step in range(20)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines, lines[0][:30]]))
    found = load("figures").run(tmp_path, "")
    assert (found["steps"], found["reward_first_ten"], found["reward_last_ten"]) == (20, 0.225, 0.725)


def test_tests_are_counted(load, tmp_path):
    (tmp_path / "junit.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='one'/><testcase classname='a' name='two'><skipped/>"
        "</testcase><testcase classname='a' name='three'><failure/></testcase></testsuite></testsuites>"
    )
    found = load("figures").tests(tmp_path, "")
    assert found == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::three"]}


def test_rules_are_counted(load):
    ran, broken = (
        {"name": f"device.{rule}", "status": status, "seconds": 0.25}
        for rule, status in (("a", "passed"), ("b", "failed"))
    )
    report = {"results": [ran, broken], "counts": {"passed": 1, "failed": 1}}
    found = load("figures").rules(None, json.dumps(report, indent=2))
    assert found == {"passed": 1, "failed": 1, "seconds": {"device": 0.5}, "failures": [broken]}
