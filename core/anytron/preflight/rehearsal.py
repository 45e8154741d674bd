r"""Try rewards on the run's own data before anything is generated.

Two questions are asked of each prompt: can its reward be earned, and is it not earned for nothing? The right answer is
written in the forms that models use, and each goes through the reward; the best of them must score more than an empty
response, the word ``None``, the right answer of another prompt, and the prompt itself.

Rewards that are dear or need a model are left out: ``judge``, ``reward_model`` and ``environment``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from anytron.data.thoughts import opened
from anytron.errors import DataError
from anytron.rewards.called import RIGHT_ANSWER
from anytron.rewards.registered import REWARDS, made
from anytron.rewards.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anytron.config.scoring import RewardSection
    from anytron.data.prompts import TokenizedPrompt
    from anytron.preflight.prepare import PreparedRun
    from anytron.rewards.answer import Failure
    from anytron.rewards.scoring import RewardWorkers

AT_ONCE = 64
"""Prompts whose responses are scored in one call."""
TIMED = 4
"""Prompts of one call where time is limited: after each call it is looked at."""
SHOWN = 3
"""Prompts that a finding names."""
OTHERS = 9
"""Prompts behind one, among which another answer is looked for, and one."""
NOT_TRIED = frozenset({"judge", "reward_model", "environment"})
"""Rewards that ask a model or an environment."""
PROMPT, OTHER = COPIED = ("the prompt itself", "the answer of another prompt")
SURE = frozenset({"exact_match", "contains", "math"})
"""Rewards that read some form of every answer that they can read at all."""
CHANCE = 0.25
"""Of the prompts: as often an answer may be right by chance, where a reward may mean that."""
FORMATS = ("format", "regex")
"""Rewards whose pattern may ask for any form."""


@dataclass
class Finding:
    """One kind of trouble.

    Attributes:
        what: The trouble, for people.
        fix: What to do.
        certain: Nothing can be learnt from such a prompt.
        count: Prompts that have it.
        rows: Some of them: the prompt's id, and what was seen.
    """

    what: str
    fix: str
    certain: bool = False
    count: int = 0
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, row: str, seen: str) -> None:
        """Count a prompt."""
        self.count += 1
        if len(self.rows) < SHOWN:
            self.rows.append((row, seen))


@dataclass
class Rehearsal:
    """What was tried, and what was found.

    Attributes:
        tried: By reward: how many prompts it was tried on.
        left_out: By reward: why it was not tried.
        findings: The trouble.
        notes: What is no trouble, and good to know.
    """

    tried: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Give it for machines."""
        return asdict(self)


def evenly(tables: Sequence[Sequence[TokenizedPrompt]], count: int | None) -> list[TokenizedPrompt]:
    """Choose prompts at even distances, of each table its share; None = all."""
    total = sum(map(len, tables))
    step = 1 if count is None else max(1, -(-total // count))
    return [table[place] for table in tables for place in range(0, len(table), step)]


def rehearse(
    prepared: PreparedRun,
    workers: RewardWorkers,
    *,
    rows: int | None = None,
    seconds: float | None = None,
    own_functions: bool = True,
    has_environment: bool = False,
    tell: Callable[[str, int, int], None] | None = None,
) -> Rehearsal:
    """Look at prompts, and try rewards on them.

    Args:
        prepared: The run, or the run with the prompts and rewards of a validation set.
        workers: The processes of its rewards.
        rows: So many prompts at most, evenly chosen; None = all.
        seconds: Begin no further call after this time; None = take as long as it needs.
        own_functions: Try the user's functions, too.
        has_environment: Responses have turns, which a function of the user may want to see.
        tell: Called with a reward, how many prompts it has been tried on, and how many there are.
    """
    found = Rehearsal()
    prompts = evenly(prepared.sampler.tables, rows)
    found.findings += examine_prompts(prompts, prepared)
    if prepared.beginning.reads_the_clock:
        found.notes.append("the chat template reads the clock: it shows the run's first moment (anytron data show)")
    marks = sorted({opened(prompt.text).strip() for prompt in prompts} - {""})
    if marks:
        found.notes.append(f"prompts open {', '.join(marks)}: format, regex and reasoning_gym see it in front")
    end = None if seconds is None else monotonic() + seconds
    for name, section in prepared.rewards.sections.items():
        own = section.function not in REWARDS
        if section.function in NOT_TRIED:
            found.left_out[name] = "it asks a model or an environment"
        elif own and not own_functions:
            found.left_out[name] = "a function of yours: anytron data check tries it"
        elif own and has_environment:
            found.left_out[name] = "it may want to see an environment"
        else:
            _try(name, section, prompts, prepared, workers, found, end, tell)
    return found


def examine_prompts(prompts: Sequence[TokenizedPrompt], prepared: PreparedRun) -> Iterator[Finding]:
    """Find what is wrong with prompts as the model reads them."""
    tokenizer, ends = prepared.tokenizer, set(prepared.sampling.end_token_ids)
    begin = tokenizer.bos_token_id
    twice = Finding(
        f"A prompt begins with {tokenizer.bos_token} twice.",
        f"remove {tokenizer.bos_token} from the prompts or messages: template or tokenizer write it already",
    )
    ended = Finding(
        "A prompt ends with a token that ends responses.",
        "remove it from the prompts, or use a chat template with a generation prompt (add_generation_prompt)",
    )
    for prompt in prompts:
        tokens = prompt.tokens
        if begin is not None and tokens[:2] == (begin, begin):
            twice.add(prompt.id, prompt.text[:40])
        last = next((token for token in reversed(tokens[-4:]) if tokenizer.decode([token]).strip()), None)
        if last in ends:
            ended.add(prompt.id, prompt.text[-40:])
    yield from (one for one in (twice, ended) if one.count)


def _try(
    name: str,
    section: RewardSection,
    prompts: Sequence[TokenizedPrompt],
    prepared: PreparedRun,
    workers: RewardWorkers,
    found: Rehearsal,
    end: float | None,
    tell: Callable[[str, int, int], None] | None,
) -> None:
    """Try one reward."""
    right_answer = reference_answers(section)
    answered = [(prompt, answer) for prompt in prompts if (answer := right_answer(prompt)) is not None]
    if not answered:
        found.left_out[name] = f"prompts have no entry {reference_key(section)!r}"
        return
    sure = section.function in SURE
    chance = tuple(COPIED) if section.function not in REWARDS else (OTHER,) if section.function == "math" else ()
    never, free, failed, long = _kinds(name, prepared, sure=sure)
    lucky = replace(free, rows=[])
    at_once = AT_ONCE if end is None else TIMED
    for start in range(0, len(answered), at_once):
        if end is not None and monotonic() > end:
            break
        written: list[tuple[TokenizedPrompt, str]] = []
        tries: list[tuple[TokenizedPrompt, str, dict[str, str], dict[str, str]]] = []
        for place in range(start, min(start + at_once, len(answered))):
            prompt, answer = answered[place]
            right = right_forms(section, answer, prompt)
            wrong = {"an empty response": "", "the word None": "None", PROMPT: prompt.text}
            others = (answered[(place + ahead) % len(answered)][1] for ahead in range(1, OTHERS))
            other = next((one for one in others if one != answer), None)
            if other is not None and section.function not in FORMATS:
                wrong[OTHER] = other
            written += [(prompt, text) for text in (*right.values(), *wrong.values())]
            tries.append((prompt, answer, right, wrong))
        try:
            values, failures = workers.rehearse(name, _samples(written, prepared))
        except DataError as error:
            failed.add(tries[0][0].id, f"{error.what} {error.why}"[:200])
            break
        place, scores = 0, iter(values)
        for prompt, answer, right, wrong in tries:
            good = [next(scores) for _ in right]
            bad = {kind: next(scores) for kind in wrong}
            if all(score is None for score in good):  # of registered rewards, none fails for a right answer it can read
                (never if section.function in REWARDS else failed).add(prompt.id, _reason(failures[place], answer))
            else:
                _judge(prompt, answer, good, bad, (never, free, lucky), chance=chance)
            place += len(right) + len(wrong)
            if sure and (shortest := _length(answer, prepared)) is not None:
                long.add(prompt.id, f"{answer[:40]!r} has {shortest} tokens")
            found.tried[name] = found.tried.get(name, 0) + 1
        if tell is not None:
            tell(name, found.tried.get(name, 0), len(answered))
    if lucky.count > CHANCE * found.tried.get(name, 0):
        found.findings.append(lucky)
    never.certain = sure and never.count == found.tried.get(name, 0)
    found.findings += [one for one in (never, free, failed, long) if one.count]


def _kinds(name: str, prepared: PreparedRun, *, sure: bool) -> tuple[Finding, Finding, Finding, Finding]:
    form = "" if sure else ", or ask for a form in the prompt that the reward reads"
    return (
        Finding(f"The reward {name} cannot be earned.", f"correct the answer or the option key{form}"),
        Finding(
            f"The reward {name} is earned without the right answer.",
            "use a reward that reads the answer alone (math, exact_match, regex), or a stricter pattern",
        ),
        Finding(f"The reward {name} fails.", "correct the function; its log has what it printed"),
        Finding(
            f"The right answer is longer than a response may be, for {name}.",
            f"raise rollout.max_new_tokens, now {prepared.sampling.max_new_tokens}",
        ),
    )


def _judge(
    prompt: TokenizedPrompt,
    answer: str,
    good: Sequence[float | None],
    bad: Mapping[str, float | None],
    kinds: tuple[Finding, Finding, Finding],
    *,
    chance: tuple[str, ...],
) -> None:
    """Compare the scores of one prompt's responses."""
    never, free, lucky = kinds
    known = [score for score in good if score is not None]
    best, scores = max(known), [score for score in (*known, *bad.values()) if score is not None]
    if best == min(scores) and best <= 0.0:
        never.add(prompt.id, f"the right answer {answer[:60]!r} scores {best:g} in every form")
        return
    kind = next((kind for kind, score in bad.items() if score is not None and score >= best), None)
    if kind is not None:
        (lucky if kind in chance else free).add(
            prompt.id, f"{kind} scores {bad[kind]:g}, the right answer {answer[:60]!r} {best:g}"
        )


def _reason(failure: Failure, answer: str) -> str:
    """Why a reward fails for the right answer; of a traceback its last line."""
    lines = failure.why.strip().splitlines() or [""]
    return f"{failure.what} {lines[-1]} (the right answer is {answer[:40]!r})"


def reference_key(section: RewardSection) -> str:
    """Name the entry of a prompt's data that a right answer stands in."""
    if section.function == "code":
        return str(section.options.get("solution", "solution"))
    return str(section.options.get("key", "answer"))


def reference_answers(section: RewardSection) -> Callable[[TokenizedPrompt], str | None]:
    """Make a function that gives the right answer to a prompt as text; None if it has none.

    A class may say it itself, ``right_answer(data)``. ``format`` wants a form, whatever the answer.
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
    """Write an answer as models do, by the name of the form. A mark that the prompt opens is not written again."""
    if section.function == "code":
        return {"program": f"```python\n{answer}\n```"}
    think = "" if opened(prompt.text) else "<think>\n"
    thoughts = f"{think}Let me see.\n</think>\n\n"
    forms = {
        "bare": answer,
        "boxed": f"So it is \\boxed{{{answer}}}.",
        "tagged": f"<answer>{answer}</answer>",
        "thought": f"{thoughts}{answer}",
        "sentence": f"The answer is {answer}.",
    }
    if section.function in FORMATS or section.function not in REWARDS:
        forms |= {
            "thought and tagged": f"{thoughts}<answer>{answer}</answer>",
            "thought and boxed": f"{thoughts}\\boxed{{{answer}}}",
            "answer line": f"Answer: {answer}",
            "four signs": f"#### {answer}",
        }
    return forms


def _length(answer: str, prepared: PreparedRun) -> int | None:
    """Tokens of an answer that is longer than a response may be; None for any other. Few letters are no more tokens."""
    room = prepared.sampling.max_new_tokens
    if len(answer.encode()) <= room:  # a token has a byte at least
        return None
    length = len(prepared.tokenizer(answer, add_special_tokens=False)["input_ids"])
    return length if length > room else None


def _samples(written: Sequence[tuple[TokenizedPrompt, str]], prepared: PreparedRun) -> list[Sample]:
    """Make samples of prompts and responses, the latter tokenised in one call."""
    tokens = prepared.tokenizer([text for _, text in written], add_special_tokens=False)["input_ids"]
    return [
        Sample(
            prompt_id=prompt.id,
            prompt_text=prompt.text,
            response_text=text,
            prompt_tokens=prompt.tokens,
            response_tokens=tuple(ids),
            log_probs=(0.0,) * len(ids),
            finished=True,
            data=prompt.data,
            images=prompt.images,
            opened=opened(prompt.text),
        )
        for (prompt, text), ids in zip(written, tokens, strict=True)
    ]
