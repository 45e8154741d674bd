"""The report in a real browser: from a file, without a network, light and dark, wide and narrow."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from anytron.record.report.page import render
from anytron.record.report.run import Run
from tests.browser import NEEDS_BROWSER, browsing
from tests.core.record.report.runs import HOSTILE, make_run, metrics, record, sample
from tests.core.record.report.test_page import hostile_run

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A report of two runs, one of them with a gap, a NaN and a number below 0."""
    folder = tmp_path_factory.mktemp("two")

    def odd(step):
        values = metrics(step, offset=-0.5)
        if step == 12:
            values["grad_norm"] = float("nan")
        if step == 20:
            del values["grad_norm"]
        return values

    first = make_run(folder / "first", 300, run=record(finished_step=300))
    other = record(failure="Rank 1 died.")
    other.config["optimizer"]["lr"] = 0.125
    second = make_run(folder / "second", 40, run=other, metrics_of=odd)
    (second / "losses.jsonl").write_text(
        json.dumps({"after_step": 9, "lost": "Rank 1 died.", "then": "it ends"}) + "\n"
    )
    return written(folder, first, second)


def written(folder, *runs):
    page = folder / "report.html"
    page.write_text(render([Run(run) for run in runs]), encoding="ascii")
    return page


def shown(browser, selector):
    """The texts of elements that are not hidden."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return browser.evaluate(f"{found}.filter(one => one.checkVisibility()).map(one => one.textContent)")


def put(browser, selector, value):
    browser.evaluate(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.value = {json.dumps(value)};"
        "for (const kind of ['input', 'change']) one.dispatchEvent(new Event(kind)); })()"
    )


def path_of(browser, metric, number=0):
    return browser.evaluate(
        f"document.querySelectorAll('[data-metric={json.dumps(metric)}] path.smooth')[{number}]?.getAttribute('d')"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_it_is_drawn_whole_without_a_complaint_and_asks_for_nothing(browser, two, tmp_path, dark, width, height):
    browser.open(two, dark=dark, width=width, height=height)
    picture = Image.open(io.BytesIO(browser.screenshot(tmp_path / "report.png"))).convert("L")

    assert browser.complaints == []
    assert browser.requests == [two.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at the side"
    assert len(shown(browser, "figure")) == 14
    assert shown(browser, "figure svg text.odd") == ["\u00d7nan at step 12"]
    assert picture.size == (width, height)
    counts = picture.histogram()
    assert (sum(counts[:64]) > sum(counts[192:])) is dark, "the ground has the colours that the system asks for"
    assert len([count for count in counts if count]) > 20, "something is drawn on it"


def test_colours_can_be_chosen(browser, two):
    browser.open(two)
    grounds = []
    for _ in range(3):
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        browser.evaluate("document.querySelector('nav button').click()")
    assert grounds == ["rgb(255, 255, 255)", "rgb(255, 255, 255)", "rgb(17, 22, 27)"]


def test_values_are_shown_under_the_pointer_and_a_drag_shows_a_part(browser, two):
    browser.open(two)
    browser.evaluate("document.querySelector('[data-metric=\"reward/mean\"]').scrollIntoView({block: 'center'})")
    box = browser.evaluate(
        "(() => { const box = document.querySelector('[data-metric=\"reward/mean\"] svg').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]; })()"
    )
    middle, left, right = box[1] + box[3] / 2, box[0] + 60, box[0] + box[2] - 12
    browser.mouse("mouseMoved", right, middle)
    (tip,) = shown(browser, ".tip")
    assert tip.startswith(("step 29", "step 300"))
    assert "first" in tip
    assert "second" in tip
    place = browser.evaluate(
        "(() => { const box = document.querySelector('.tip:not([hidden])').getBoundingClientRect();"
        "return [box.left, box.right, box.top]; })()"
    )
    assert box[0] < place[0] < place[1] <= right, "beside the pointer, on the side where there is room"
    assert box[1] < place[2] < middle

    before = path_of(browser, "policy/entropy")
    browser.mouse("mousePressed", left, middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + 60, middle, button="left", buttons=1)
    browser.mouse("mouseReleased", left + 60, middle, button="left", clickCount=1)
    assert path_of(browser, "policy/entropy") != before, "all plots show the part"
    browser.evaluate(
        "[...document.querySelectorAll('.bar button')].find(one => one.textContent === 'all steps').click()"
    )
    assert path_of(browser, "policy/entropy") == before
    assert browser.complaints == []


def test_lines_can_be_smoothed_hidden_and_drawn_on_a_logarithmic_axis(browser, two):
    browser.open(two)
    plain = path_of(browser, "rollout/log_prob_abs_diff")
    put(browser, ".bar input[type=range]", "0.9")
    assert path_of(browser, "rollout/log_prob_abs_diff") != plain
    assert len(shown(browser, "[data-metric='lr'] path.raw")) == 2
    put(browser, ".bar input[type=range]", "0")
    assert path_of(browser, "rollout/log_prob_abs_diff") == plain
    browser.evaluate("document.querySelector('[data-metric=grad_norm] figcaption button').click()")
    assert len(shown(browser, "[data-metric=grad_norm] svg .rule")) >= 2
    browser.evaluate("document.querySelector('.bar .run').click()")
    assert len(shown(browser, "[data-metric=grad_norm] path.smooth")) == 1
    put(browser, ".bar input[type=search]", "KL")
    assert shown(browser, "figure b") == ["policy/kl", "loss/kl"]
    assert browser.complaints == []


def test_samples_are_found_by_text_step_and_reward(browser, two):
    browser.open(two)
    assert [text.partition(" of")[0] for text in shown(browser, ".end h3")] == [
        "First logged: step 1",
        "Last logged: step 300",
        "First logged: step 1",
        "Last logged: step 40",
    ]
    put(browser, "#samples .filters input[type=search]", "it is 41.")
    found = shown(browser, ".list .response")
    assert found
    assert set(found) == {"It is 41."}
    put(browser, "#samples .filters input[type=search]", "")
    put(browser, "#samples input[aria-label='From step']", "5")
    put(browser, "#samples input[aria-label='To step']", "5")
    put(browser, "#samples select[aria-label=Order]", "-reward")
    rewards = shown(browser, ".list header b")
    assert len(rewards) in (4, 8)
    assert rewards[0] == "reward 0.75"
    assert rewards[-1] == "reward 0"
    put(browser, "#samples select[aria-label=Which]", "failed")
    assert shown(browser, ".list article") == []


def test_what_differs_in_the_configurations_and_what_went_wrong(browser, two):
    browser.open(two)
    rows = browser.evaluate(
        "[...document.querySelectorAll('#configuration tbody tr')]"
        ".map(row => [...row.children].map(one => one.textContent))"
    )
    assert rows == [["optimizer.lr", "1e-06", "0.125"]]
    assert "Rank 1 died." in shown(browser, "#summary")[0]
    assert "lost after step 9" in shown(browser, "#events")[0]
    browser.evaluate("document.querySelector('#platform summary').click()")
    assert any("it hard-codes" in text for text in shown(browser, "#platform table"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), hostile_run(tmp_path_factory.mktemp("runs")))


def test_what_is_hostile_is_text(browser, hostile):
    browser.open(hostile)
    put(browser, "#samples input[aria-label='To step']", "1")
    assert browser.complaints == []
    assert browser.requests == [hostile.as_uri()]
    assert browser.evaluate("document.title.endsWith('- Anytron')")
    assert browser.evaluate("document.querySelectorAll('#report script, #report img, #report iframe').length") == 0
    assert HOSTILE[1] in shown(browser, "#samples .list .response")
    assert any("\u241b[2J" in text for text in shown(browser, "#samples .list .response"))
    assert any("\\u202e" in text for text in shown(browser, "#samples .list .response"))
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "__proto__" in shown(browser, "figure b")


def test_a_page_that_was_open_to_it_would_be_noticed(browser, hostile, tmp_path):
    page = tmp_path / "open.html"
    ends = "</main><script>document.title = 'owned'</script><img src='https://example.invalid/x.png'>"
    page.write_text(hostile.read_text().replace("</main>", ends, 1))
    browser.open(page)
    assert len(browser.complaints) == 2, "the page's own policy refuses the script and the picture"
    assert browser.evaluate("document.title") != "owned"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(browser, tmp_path, steps):
    browser.open(written(tmp_path, make_run(tmp_path / "run", steps, run=record())))
    assert browser.complaints == []
    assert (shown(browser, "#plots p.soft") == ["No step is recorded yet."]) is (steps == 0)
    assert browser.evaluate(
        "![...document.querySelectorAll('path')].some(one => one.getAttribute('d').includes('NaN'))"
    )


def test_pictures_of_prompts_are_shown(browser, tmp_path):
    run = make_run(tmp_path / "run", 1, samples_of=lambda step: [sample(step, images=["images/00001-0.png"])])
    (run / "images").mkdir()
    Image.new("RGB", (64, 48), "red").save(run / "images" / "00001-0.png")
    browser.open(written(tmp_path, run))
    put(browser, "#samples select[aria-label=Which]", "all")
    sizes = browser.evaluate("Promise.all([...document.images].map(one => one.decode().then(() => one.naturalWidth)))")
    assert browser.complaints == []
    assert set(sizes) == {64}
