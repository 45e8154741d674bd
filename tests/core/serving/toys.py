"""A tokenizer that merges across everything, templates like published ones, and engines that write at random."""

from __future__ import annotations

import random
from collections import Counter
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from anytron.workers.engines.rollout_engine import Response, SamplingParams

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bos|>", "<|pad|>"]
CORPUS = [
    "user\nhello\n assistant\n the answer is 42\n\nthe tool says {\"name\": \"add\", \"arguments\": {\"a\": 1}}\n",
    "User: hi\nAssistant: hi\nUser: hello there\n<think>\nhm\n</think>\n\nfine</tool_call>\n<tool_call>\n",
]  # fmt: skip
CORPUS = [*CORPUS, "assistant: hello\nuser: hi\n"] * 20
QWEN = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if quiet %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}
"""
LLAMA = """{{ '<|bos|>' }}{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n\n' + m.content | trim }}
{%- for call in m.tool_calls or [] %}{{ '\n' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"""
PLAIN = """{% for m in messages %}{{ m.role + ': ' + m.content }}
{%- for call in m.tool_calls or [] %}{{ ' ' + call.function.name }}{% endfor %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
TEMPLATES = {"qwen": QWEN.strip("\n"), "llama": LLAMA, "plain": PLAIN}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAID = [
    "hello there", "the answer is 42", "<think>\nhm\n</think>\n\nfine", "<think>hm\n\n</think>the answer", "é€😀",
    " ", "",
    'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>{broken</tool_call>",
    '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
]  # fmt: skip


@lru_cache
def tokenizer(template="plain"):
    """A byte-level tokenizer without a border that merges may not cross."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=SPECIAL, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=SPECIAL
    )
    fast.chat_template = TEMPLATES[template]
    return fast


END = 1
"""Id of ``<|im_end|>``."""
SAMPLING = SamplingParams(max_new_tokens=64, end_token_ids=(END,), pad_token_id=3)


def split_at_random(order, text, template="plain"):
    """Token ids that decode to a text and are not those that the tokenizer would choose."""
    one = tokenizer(template)
    ids = []
    while text:
        size = order.randint(1, 3)
        ids += one(text[:size], add_special_tokens=False)["input_ids"]
        text = text[size:]
    return ids


class RandomPool:
    """Answers each request with a text of :data:`SAID` in random pieces; keeps all questions and answers."""

    def __init__(self, seed=0, template="plain", said=SAID):
        self.order, self.template, self.said = random.Random(seed), template, said
        self.version, self.number, self.waiting, self.cancelled = 0, 0, {}, []
        self.log, self.sampled = [], []
        self.held = False  # whether answers are held back
        self.script = None  # token ids of one long answer, which is asked for in slices
        self.begun = None  # number of tokens before it

    def ask(self, questions, answered):
        numbers = []
        for prompt, sampling, seed in questions:
            self.waiting[self.number] = (answered, prompt.tokens, sampling, seed)
            numbers.append(self.number)
            self.number += 1
        return numbers

    def poll(self, seconds):
        if self.held:
            return []
        asked, self.waiting = self.waiting, {}
        for number, (answered, *question) in asked.items():
            answered(number, self.answer(*question))
        return []

    def cancel(self, numbers):
        self.cancelled += numbers
        for number in numbers:
            del self.waiting[number]

    def answer(self, tokens, sampling, seed):
        self.sampled.append(sampling)
        ids = split_at_random(self.order, self.order.choice(self.said), self.template)
        ends = self.order.random() < 0.9
        ids = [*ids, END] if ends else ids or [7]
        if self.script is not None:
            self.begun = len(tokens) if self.begun is None else self.begun
            ids, ends = [*self.script, END][len(tokens) - self.begun :], True
        reason = "stop" if ends and len(ids) <= sampling.max_new_tokens else "length"
        ids = ids[: sampling.max_new_tokens]
        self.version += self.order.random() < 0.2  # weights change between turns, and within one
        versions = [self.version] * len(ids)
        if self.order.random() < 0.2 and len(ids) > 1:
            self.version += 1
            versions[-1] = self.version
        log_probs = [-self.order.randint(1, 1000) / 1024 for _ in ids]
        response = Response(ids, log_probs, reason, versions)
        self.log.append((tuple(tokens), response))
        return response


def check_law(log, sessions):
    """Each marked token was sampled, once, after exactly the tokens before it, with this log-prob and these weights."""
    answered = {}
    for tokens, response in log:
        answered.setdefault(tokens, []).append(response)
    marked = Counter()
    for session in sessions:
        for branch in session.branches():
            place, size = 0, len(branch.tokens)
            assert len(branch.mask) == len(branch.log_probs) == len(branch.versions) == size
            while place < size:
                if branch.versions[place] is None:
                    assert not branch.mask[place]
                    place += 1
                    continue
                said = [
                    one for one in answered.get(branch.tokens[:place], ())
                    if tuple(one.tokens) == branch.tokens[place : place + len(one.tokens)]
                    and tuple(one.log_probs) == branch.log_probs[place : place + len(one.tokens)]
                    and tuple(one.versions) == branch.versions[place : place + len(one.tokens)]
                ]  # fmt: skip
                assert said, f"no engine wrote token {place} after the tokens before it"
                response = max(said, key=lambda one: len(one.tokens))
                run = branch.mask[place : place + len(response.tokens)]
                assert len(set(run)) == 1
                if run[0]:
                    marked[branch.tokens[:place], tuple(response.tokens)] += 1
                place += len(response.tokens)
    sampled = Counter((tokens, tuple(response.tokens)) for tokens, response in log)
    assert marked == sampled
    return sum(len(tokens) * count for (_, tokens), count in marked.items())
