"""Prompts of ``anytron chat`` that are conversations."""

import pytest

from anytron.base.errors import DataError
from anytron.run.rollout.answers import messages_of


def test_a_prompt_that_begins_with_objects_is_a_conversation():
    assert messages_of(' [{"role": "user", "content": "x"}]', 1) == [{"role": "user", "content": "x"}]
    assert messages_of("[0, 1]", 1) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('[{"role": "user"', "must be a JSON list of messages: it is not JSON: Expecting"),
        ('[{"role": "user", "content": "x"}, 3]', "not a list of objects whose content is text"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "not a list of objects whose content is text"),
        ('[{"a": ' * 100_000, "must be a JSON list of messages: it is nested too deeply"),
    ],
    ids=["cut short", "a number", "a picture", "deep"],
)
def test_a_conversation_that_cannot_be_read_is_named(line, why):
    with pytest.raises(DataError, match=why) as raised:
        messages_of(line, 7)

    assert raised.value.where == "prompt 7"
