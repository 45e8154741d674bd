"""A teacher, or a reward model, whose numbers mean other tokens than the policy's is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError
from anytron.config.running import RewardModelSection, TeacherSection
from anytron.config.schema import ModelSection
from anytron.run.preflight.prepare import check_vocabulary
from anytron.task.data.examination import examined

WORDS = ["<eos>", "a", "b", "c"]


def tokenizer(words):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


@pytest.fixture
def teacher(tmp_path):
    def write(words):
        tokenizer(words).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 48}))
        return TeacherSection(path=str(tmp_path))

    return write


def compare(section, words):
    """Compare a model in a directory with a policy of these words, as a run does."""
    key = "teacher.path" if isinstance(section, TeacherSection) else "reward_model.path"
    with examined(ModelSection(config={"model_type": "qwen3"}, tokenizer="a.py:b"), {key: Path(section.path)}) as found:
        assert found[key].context_length == 48
    check_vocabulary(section, found[key].vocabulary, tokenizer(words))


@pytest.mark.parametrize("words", [WORDS, [*WORDS, "d", "<think>"]], ids=["the same", "some more"])
def test_the_policy_s_tokens_have_the_same_numbers(teacher, words):
    compare(teacher(words), WORDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["<eos>", "b", "a", "c"],
            "2 of the policy's 4 tokens have a different id in this model, or are missing there: 'a' has id 1 in the",
        ),
        (WORDS[:3], "or are missing there: 'c' has id 3 in the policy, none in this model"),
        (["<eos>", "x", *WORDS[1:]], "3 of the policy's 4 tokens"),
    ],
    ids=["exchanged", "fewer", "one in between"],
)
def test_another_vocabulary_is_refused_by_name(teacher, words, says):
    with pytest.raises(ConfigError) as caught:
        compare(teacher(words), WORDS)
    assert says in str(caught.value)
    assert "teacher.path" in str(caught.value)
    assert "same family" in caught.value.fix


def test_a_reward_model_of_another_vocabulary_is_refused_as_such(teacher):
    section = RewardModelSection(path=teacher(WORDS[:3]).path)
    with pytest.raises(ConfigError, match=r"(?s)The reward model's vocabulary differs.*reward_model\.path") as caught:
        compare(section, WORDS)
    assert "responses are not tokenized again" in caught.value.fix
    compare(section, WORDS[:3])
