"""The responses on which a reward is tried: right answers in the forms that models write, and wrong answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.packed import Packed
from anytron.task.data.thoughts import opened
from anytron.task.rewards.answer import RIGHT_ANSWER
from anytron.task.rewards.registered import REWARDS, made
from anytron.task.rewards.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.config.scoring import RewardSection
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.task.data.prompts import TokenizedPrompt

PROMPT, OTHER = COPIED = ("the prompt itself", "another prompt's answer")
FORMATS = ("format", "regex")
"""Rewards with a pattern, which may require any form of response."""


def reference_key(section: RewardSection) -> str:
    """Return the name of the entry of a prompt's data that holds the right answer."""
    if section.function == "code":
        return str(section.options.get("solution", "solution"))
    return str(section.options.get("key", "answer"))


def reference_answers(section: RewardSection) -> Callable[[TokenizedPrompt], str | None]:
    """Make a function that returns the right answer to a prompt as text; None if the prompt has none.

    If a reward class has the method ``right_answer(data)``, the function calls it. For the reward ``format``, which
    accepts any answer, it returns a fixed one.

    Raises:
        DataError: Raised by the returned function, if ``right_answer`` fails.
        ConfigError: The reward cannot be made with its options.
    """
    if section.function == "format":
        return lambda _: "42"
    reward = made(section.function, section.options, "rewards")
    told = getattr(reward, "right_answer", None)
    key = reference_key(section)

    def answer(prompt: TokenizedPrompt) -> str | None:
        where = f"{section.function}, prompt {prompt.id}"
        said = prompt.data.get(key) if told is None else RIGHT_ANSWER.call(told, where, prompt.data)
        return None if said is None else str(said).strip()

    return answer


def right_forms(section: RewardSection, answer: str, prompt: TokenizedPrompt) -> dict[str, str]:
    """Write an answer in each form that models use; return the texts by the form's name.

    A prompt that ends with an opening tag, such as ``<think>``, gets responses without this tag.
    """
    if section.function == "code":
        return {"program": f"```python\n{answer}\n```"}
    think = "" if opened(prompt.text) else "<think>\n"
    thoughts = f"{think}So.\n</think>\n\n"
    forms = {
        "bare": answer,
        "boxed": f"So it is \\boxed{{{answer}}}.",
        "<answer>": f"<answer>{answer}</answer>",
        "behind </think>": f"{thoughts}{answer}",
        "in a sentence": f"The answer is {answer}.",
    }
    if section.function in FORMATS or section.function not in REWARDS:
        forms |= {
            "</think>, <answer>": f"{thoughts}<answer>{answer}</answer>",
            "</think>, boxed": f"{thoughts}\\boxed{{{answer}}}",
            "Answer:": f"Answer: {answer}",
            "####": f"#### {answer}",
        }
    return forms


def wrong_forms(section: RewardSection, other: str | None, prompt: TokenizedPrompt) -> dict[str, str]:
    """Return wrong responses to a prompt, by kind.

    Args:
        section: Configuration section of the reward.
        other: The right answer of another prompt, different from the answer of this prompt; None = not known.
        prompt: The prompt.
    """
    wrong = {"an empty response": "", "the word None": "None", PROMPT: prompt.text}
    if other is not None and section.function not in FORMATS:
        wrong[OTHER] = other
    return wrong


def samples_of(written: Sequence[tuple[TokenizedPrompt, str]], prepared: PreparedRun) -> list[Sample]:
    """Make samples from prompts and response texts, tokenised in one call; each response gets an end token."""
    given = prepared.tokenizer([text for _, text in written], add_special_tokens=False)["input_ids"]
    tokens = [(*ids, *prepared.sampling.end_token_ids[:1]) for ids in given]
    return [
        Sample(
            prompt_id=prompt.id,
            prompt_text=prompt.text,
            response_text=text,
            prompt_tokens=prompt.tokens,
            response_tokens=Packed("i", ids),
            log_probs=Packed("f", [0.0] * len(ids)),
            finished=True,
            data=prompt.data,
            images=prompt.images,
            opened=opened(prompt.text),
        )
        for (prompt, text), ids in zip(written, tokens, strict=True)
    ]
