"""Which steps are recorded: a list of them, or a range of which both ends are."""

import pytest
import yaml
from pydantic import ValidationError

from anytron.config.dump import to_yaml
from anytron.config.load import load_config
from anytron.config.running import ProfileSection
from tests.house import ROOT

EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        ("3-6", [3, 4, 5, 6]),
        ("' 3 - 6 '", [3, 4, 5, 6]),
        ("7-7", [7]),
        ("1-10", list(range(1, 11))),
        ("[3, 6]", [3, 6]),
    ],
)
def test_a_range_has_both_of_its_ends_and_a_list_what_is_in_it(written, steps):
    config = load_config(EXAMPLE, [f"trainer.profile.steps={written}"])

    assert config.trainer.profile.steps == steps
    assert yaml.safe_load(to_yaml(config))["trainer"]["profile"]["steps"] == steps


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("6-3", "'6-3' is not a range of steps: 3-6 means steps 3, 4, 5 and 6; [3, 6] means steps 3 and 6"),
        ("3..6", "not a range of steps"),
        ("-3", "valid list"),  # a number
        ("", "not a range of steps"),
        ("\u0663-\u0666", "not a range of steps"),
        ("3-13", "'3-13' selects 11 steps; at most 10 can be recorded"),
        (f"1-{10**12}", "steps; at most 10 can be recorded"),  # of which no list is made
    ],
)
def test_what_is_no_range_or_a_long_one_is_refused(written, says):
    with pytest.raises(ValidationError) as refused:
        ProfileSection(steps=-3 if written == "-3" else written)
    assert says in str(refused.value)
