"""What the pages say is true: links lead somewhere, examples of configurations load, examples of code run."""

import importlib.util
import re
from pathlib import Path

import pytest

from anytron.config.generation import EnvironmentSection
from anytron.config.imports import resolve
from anytron.config.load import load_config
from anytron.config.schema import DataSection
from anytron.record.sinks import SinkRun
from anytron.record.sinks.delivery import load_sink, sink_diagnostics
from anytron.task.data.sources import load_prompts
from anytron.task.environments import Task, Turn
from anytron.task.environments.pool import check_environment
from anytron.task.environments.protocol import ENVIRONMENT_PATH
from anytron.task.rewards import Sample
from tests.core.record.sinks.conftest import configuration

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md"), *ROOT.glob("examples/**/*.md")]
)
SOURCES = sorted(path for folder in ("core", "backends", "plugins") for path in (ROOT / folder).rglob("*.py"))


def blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]

    assert missing == []


def test_pages_that_the_sources_mention_exist():
    mentioned = {name for path in SOURCES for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}

    assert [name for name in sorted(mentioned) if not (ROOT / name).is_file()] == []


def test_the_tutorial_s_own_configuration_is_one(tmp_path):
    (configuration,) = blocks("docs/tutorial/first-run.md", "yaml")
    (tmp_path / "run.yaml").write_text(configuration)

    config = load_config(tmp_path / "run.yaml")

    assert config.data.options["path"] == str(tmp_path.resolve() / "questions.jsonl")


def test_the_example_of_a_reward_scores(tmp_path):
    (tmp_path / "my_rewards.py").write_text(blocks("docs/how-to/write-a-reward.md", "python")[0])
    spec = importlib.util.spec_from_file_location("my_rewards", tmp_path / "my_rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def sample(response, tokens):
        return Sample("p", "?", response, (1,), (1,) * tokens, (0.0,) * tokens, finished=True, data={"answer": "42"})

    scores = module.short_and_right([sample("it is 42", 3), sample("it is 42", 101), sample("41", 1)], limit=100)

    assert scores == [1.0, 0.5, 0.0]


def test_the_examples_of_sinks_write(tmp_path):
    ten_lines, with_options = blocks("docs/how-to/write-a-metric-sink.md", "python")
    assert len([line for line in ten_lines.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_sinks.py").write_text(ten_lines)
    (tmp_path / "service.py").write_text(with_options)
    sinks = [{"sink": f"{tmp_path}/my_sinks.py:RewardFile"}]
    assert list(sink_diagnostics(configuration(tmp_path, sinks))) == []
    service = {"sink": f"{tmp_path}/service.py:Service"}
    (missing,) = sink_diagnostics(configuration(tmp_path, [service]))
    assert missing.key == "tracking.sinks.0.options.url"
    assert list(sink_diagnostics(configuration(tmp_path, [{**service, "options": {"url": "http://a"}}]))) == []

    sink = load_sink(configuration(tmp_path, sinks).tracking.sinks[0], "key")(SinkRun("run", tmp_path, {}, None), None)
    sink.write(1, {"step": 1.0, "reward/mean": 0.5})
    sink.close()
    assert (tmp_path / "reward.csv").read_text() == "1,0.5\n"


def test_the_example_of_an_environment_plays(tmp_path):
    (tmp_path / "my_environments.py").write_text(blocks("docs/how-to/use-tools-and-environments.md", "python")[0])
    made = resolve(f"{tmp_path}/my_environments.py:HigherOrLower", ENVIRONMENT_PATH)
    game = made(tries=3)
    game.reset(Task("p", "?", {"number": 42}, seed=0, max_turns=8))

    answers = [game.step(Turn(text, (1,), finished=True)) for text in ("17", "50", "42")]

    assert [answer.text for answer in answers] == [" higher\n", " lower\n", None]
    assert (answers[-1].done, answers[-1].reward) == (True, 1.0)
    check_environment(EnvironmentSection(path=f"{tmp_path}/my_environments.py:HigherOrLower", options={"tries": 3}))


def test_the_examples_of_prompts_with_pictures_are_read(tmp_path):
    page = "docs/how-to/train-a-vision-language-model.md"
    text, messages = blocks(page, "json")
    (tmp_path / "lines.jsonl").write_text(text + messages)
    (tmp_path / "mine.py").write_text(blocks(page, "python")[0])

    first, second = load_prompts(DataSection(source="jsonl", options={"path": str(tmp_path / "lines.jsonl")}))
    (own,) = load_prompts(DataSection(source=f"{tmp_path}/mine.py:prompts"))

    assert first.images == (tmp_path / "shapes/17.png",)
    assert second.messages[0]["content"][0] == {"type": "image"}
    assert second.images == (tmp_path / "17.png",)
    assert own.images[0].size == (64, 64)
    assert own.text.replace("How many?", "") in first.text
