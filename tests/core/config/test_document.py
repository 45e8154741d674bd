"""The reference of the configuration is that of the schema."""

from pathlib import Path

from anytron.config.document import render
from anytron.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_in_the_tree_is_current():
    written = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")

    assert written == render(), "run: python -m anytron.config.document docs/reference/config.md"


def test_options_of_the_engines_are_in_it():
    text = render()

    assert "## engine.options of megatron" in text
    assert "| `router_replay` | `off` or `old-log-probs` | `off` |" in text
    assert "## rollout.options of transformers" in text
    assert "| `device_map` | `balanced` or null | null |" in text


def test_every_key_is_explained():
    rows = [line for line in render().splitlines() if line.startswith("| `")]

    assert len(rows) > 4 * len(RunConfig.model_fields)
    assert not [row for row in rows if row.rstrip().endswith("|  |")]
