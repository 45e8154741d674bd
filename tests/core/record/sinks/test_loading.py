"""What is wrong with a sink is found before the run starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from anytron.base.components import METRIC_SINKS, component_names, load_component
from anytron.record.sinks.contract import MetricSink
from anytron.record.sinks.delivery import sink_diagnostics
from tests.core.record.sinks.conftest import configuration
from tests.house import ROOT

NAMES = ["mlflow", "swanlab", "tensorboard", "wandb"]
TEXT = """
from anytron.record.sinks import MetricSink
from anytron.config.section import Section
class Options(Section):
    url: str = "here"
class Own(MetricSink):
    options_model = Options
    def __init__(self, run, options): ...
    def write(self, step, metrics): ...
class Needy(Own):
    packages = ("no_such_package_anywhere",)
    install = "pip install it"
def function(run, options): ...
"""


def found(tmp_path, *sinks):
    (tmp_path / "sinks.py").write_text(TEXT)
    return [str(one) for one in sink_diagnostics(configuration(tmp_path, sinks))]


def test_ours_are_installed_and_named_in_the_extras():
    assert component_names(METRIC_SINKS, "anytron") == NAMES
    text = (ROOT / "pyproject.toml").read_text()
    for name in NAMES:
        sink = load_component(METRIC_SINKS, name, "key")
        assert issubclass(sink, MetricSink)
        assert sink.packages == (name,)
        assert sink.install == f"pip install 'anytron[{name}]'"
        assert f'\n{name} = ["{name}>=' in text


def test_a_sink_of_ones_own_passes(tmp_path):
    assert found(tmp_path, {"sink": "sinks.py:Own", "options": {"url": "there"}}) == []


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ({"sink": "tensorbord"}, "did you mean tensorboard?"),
        ({"sink": "sinks.py:Onw"}, "did you mean Own?"),
        ({"sink": "sinks.py:function"}, "not a subclass of anytron.record.sinks.MetricSink"),
        ({"sink": "nowhere.py:Own"}, "there is no file"),
        ({"sink": "sinks.py:Own", "options": {"ulr": 1}}, "did you mean tracking.sinks.0.options.url?"),
        ({"sink": "sinks.py:Own", "options": {"url": 1}}, "tracking.sinks.0.options.url"),
        ({"sink": "sinks.py:Needy"}, "needs the package no_such_package_anywhere, which is not installed"),
    ],
)
def test_mistakes_are_errors(tmp_path, sink, says):
    (text,) = found(tmp_path, sink)
    assert says in text
    assert "tracking.sinks.0" in text


def test_two_of_a_name_are_refused(tmp_path):
    (text,) = found(tmp_path, {"sink": "sinks.py:Own"}, {"sink": "sinks.py:Own"})
    assert "two sinks have the name Own" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_an_error_with_its_command(tmp_path, name, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else find_spec(package))
    (text,) = found(tmp_path, {"sink": name})
    assert f"{name} needs the package {name}, which is not installed" in text
    assert f"pip install 'anytron[{name}]'" in text


def test_finding_a_sink_imports_no_library_of_it(tmp_path):
    program = (
        "import sys; from anytron.base.components import *\n"
        f"for name in {NAMES}: load_component(METRIC_SINKS, name, 'key')\n"
        f"print(sorted(set(sys.modules) & {{*{NAMES}, 'torch', 'megatron'}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
