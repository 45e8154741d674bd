"""Validations in the report and in the terminal: curves with intervals, samples to read, why the run ended."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from anytron.cli.main import app
from anytron.record.report.page import render
from anytron.record.report.run import Run, State
from tests.browser import NEEDS_BROWSER, browsing
from tests.core.record.report.runs import HOSTILE, make_run, record, sample, write_lines
from tests.core.record.report.test_in_a_browser import put, shown
from tests.core.record.report.test_page import content_of, tags

MEAN = "validation/digits/mean@4"
STOPPED = "early stop after step 30: it did not improve"


def validated(step):
    value = step / 40
    return {
        "step": step,
        MEAN: value,
        f"{MEAN}/low": value - 0.1,
        f"{MEAN}/high": value + 0.1,
        "validation/time_s": 2.0,
    }


@pytest.fixture
def run(tmp_path):
    """A run with validations before training and after every tenth of thirty steps, ended early."""
    config = record(finished_step=30, early_stop=STOPPED)
    config.config["trainer"]["total_steps"] = 100

    def samples(step):
        of_training = [sample(step, number) for number in range(4)]
        return of_training + ([sample(step, 9, validation="digits")] if step % 10 == 0 else [])

    path = make_run(tmp_path / "run", run=config, samples_of=samples)
    write_lines(path / "validation.jsonl", [validated(step) for step in (0, 10, 20, 30)])
    return path


def test_curves_stand_after_the_reward_with_their_intervals_and_not_as_metrics_of_their_own(run):
    content = content_of(render([Run(run)]))
    shown = content["runs"][0]
    assert content["leading"][:2] == ["reward/mean", MEAN]
    assert shown["series"][MEAN] == [[0, 10, 20, 30], [0, 0.25, 0.5, 0.75]]
    assert shown["series"][f"{MEAN}/low"][1] == [-0.1, 0.15, 0.4, 0.65]
    chapters = {chapter["title"]: chapter["metrics"] for chapter in content["chapters"]}
    assert chapters["Validation"] == [MEAN, "validation/time_s"]
    assert "mean reward of the N responses" in content["metrics"][MEAN]["meaning"]
    assert ["ended by", STOPPED] in shown["facts"]
    assert ["step", "30 of 100"] in shown["facts"]
    assert Run(run).state is State.FINISHED
    assert {one["step"] for one in shown["samples"] if one.get("validation") == "digits"} == {10, 20, 30}


def test_a_run_that_goes_on_after_an_early_stop_is_not_finished(run):
    config = json.loads((run / "run.json").read_text()) | {"early_stop": None}
    (run / "run.json").write_text(json.dumps(config))
    assert Run(run).state is State.STOPPED


def test_a_resumed_run_s_validations_are_read_again(run):
    shown = Run(run)
    part = run / "new"
    write_lines(part, [validated(step) for step in (0, 10)])
    part.replace(run / "validation.jsonl")
    shown.update()
    assert list(shown.series[MEAN].steps) == [0, 10]
    assert shown.history.last == 30, "training's metrics are another file"


def test_what_is_hostile_in_a_validation_is_shown_as_text(run):
    samples = [sample(30, 1, validation=one, images=["images/00030-../../x-1.png"]) for one in [*HOSTILE, 7, {}]]
    write_lines(run / "samples.jsonl", samples)
    odd = {"step": 40, HOSTILE[0]: 1.0, "validation/x/mean@2": "text", f"validation/{HOSTILE[1]}/mean@1": float("nan")}
    with (run / "validation.jsonl").open("a") as file:
        file.write(json.dumps(odd) + "\n[1]\n{no\n")
    page = render([Run(run)])
    assert tags(page).count("script") == 2
    assert content_of(page)["runs"][0]["problems"] == ["validation.jsonl: 2 lines are not readable and left out"]
    assert all(one["images"] == [] for one in content_of(page)["runs"][0]["samples"])


def test_the_terminal_shows_them_too(run):
    shown = CliRunner().invoke(app, ["watch", str(run), "--once"]).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith(MEAN)]
    assert line.split()[-3:] == ["0.75", "0", "0.75"]
    assert STOPPED in " ".join(shown.split())
    assert "validation digits after step 30, reward" in shown
    assert STOPPED in CliRunner().invoke(app, ["watch", str(run)]).stdout


@pytest.mark.browser
@NEEDS_BROWSER[1]
def test_an_interval_is_a_band_around_its_curve(run, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(render([Run(run)]), encoding="ascii")
    with browsing(tmp_path / "profile") as browser:
        browser.open(page)
        assert browser.complaints == []
        band = f"document.querySelector('[data-metric={json.dumps(MEAN)}] path.band').getBBox()"
        assert browser.evaluate(f"{band}.width") > 100
        assert browser.evaluate(f"{band}.height") > 50
        assert browser.evaluate("document.querySelectorAll('path.band').length") == 1
        put(browser, "#samples select[aria-label=Which]", "validation")
        assert shown(browser, "#samples .list .validation") == ["validation digits"] * 3
