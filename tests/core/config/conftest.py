"""A configuration that is right, and how one that is wrong is refused."""

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config

GOOD = """\
model:
  config: {model_type: qwen3}
  tokenizer: tokenizer.py:make
data:
  source: task:prompts
rewards:
  - function: first
  - function: second
    weight: 0.5
optimizer:
  lr: 1e-4
trainer:
  seed: 3
  total_steps: 10
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def good(write):
    return write(GOOD)


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value
