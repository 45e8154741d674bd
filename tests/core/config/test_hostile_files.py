"""Whatever stands in a configuration is refused in words, and soon."""

import re

import pytest

from tests.core.config.conftest import GOOD, refusal


def doubling(pattern, count, indent=""):
    """Keys ``a1``, ``a2``, ..., each of which refers to the one before."""
    return "".join(f"{indent}a{index + 1}: {pattern.format(index)}\n" for index in range(count))


DEEP = "[" * 50 + "]" * 50
HOSTILE = {
    "lists in lists": (f"model: {DEEP}", "nested too deeply"),
    "100 000 lists": (f"model: {'[' * 100_000}", "nested too deeply"),
    "100 000 mappings": (f"{'{a: ' * 100_000}", "nested too deeply"),
    "5000 blocks": ("".join(f"{' ' * depth}a:\n" for depth in range(5000)), "nested too deeply"),
    "an alias of itself": ("model: &a [*a]", "nested too deeply|not valid"),
    "a billion laughs": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)),
        "not valid YAML",
    ),
    "a Python object": ("model: !!python/object/apply:os.system [id]", "not valid YAML"),
    "a Python name": ("model: !!python/name:os.system", "not valid YAML"),
    "an unknown tag": ("model: !evil x", "not valid YAML"),
    "a number that is none": ("model: !!int x", "not valid YAML"),
    "a float that is none": ("model: !!float x", "not valid YAML"),
    "5000 digits": (f"trainer: {{seed: {'9' * 5000}}}", "trainer|not valid YAML"),
    "a date that is none": ("model: !!timestamp 2026-99-99", "not valid YAML"),
    "bytes": ("model: !!binary '===='", "not valid YAML|model"),
    "a NUL": ("model: \0", "not valid YAML"),
    "a NUL by escape": (GOOD.replace("tokenizer.py:make", '"a\\0b"'), "model.tokenizer.*NUL"),
    "half of a pair": (GOOD.replace("tokenizer.py:make", '"a\\ud800"'), "model.tokenizer|Unicode"),
    "a NUL in a key": (GOOD + 'data2: {"a\\0": 1}\n', "data2"),
    "nothing": ("", "not a mapping|required|model"),
    "a list": ("- 1", "not a mapping"),
    "a number": ("5", "not a mapping|not valid YAML"),
    "two documents": ("a: 1\n---\nb: 2", "not valid YAML"),
    "a key twice": ("model: 1\nmodel: 2", "not valid YAML"),
    "keys that are lists": ("? [a]\n: 1", "not valid YAML"),
    "keys that are numbers": (GOOD + "5: 1\n", "5"),
    "keys that are null": (GOOD + "~: 1\n", ""),
    "tabs": ("model:\n\tpath: m", "not valid YAML"),
    "an interpolation of itself": ("model: ${model}", "model: it refers to itself|refers to itself"),
    "interpolations of each other": ("model: ${data}\ndata: [1, '${rewards}']\nrewards: {x: '${model}'}", "itself"),
    "doubling": (f"a0: xx\n{doubling('${{a{0}}}${{a{0}}}', 31)}", "The references in a16 cannot be resolved.*1048576"),
    "doubling nothing": (f"a0: ''\n{doubling('${{a{0}}}${{a{0}}}', 31)}", "cannot be resolved"),
    "doubling, from its end": (
        "".join(f"a{i}: ${{a{i + 1}}}${{a{i + 1}}}\n" for i in range(31)) + "a31: x",
        "cannot be resolved",
    ),
    "doubling mappings": ("a0: {x: 1}\n" + doubling("{{x: '${{a{0}}}', y: '${{a{0}}}'}}", 31), "cannot be resolved"),
    "doubling lists": ("a0: [x]\n" + doubling("['${{a{0}}}', '${{a{0}}}']", 31), "cannot be resolved"),
    "doubling neighbours": (f"s:\n  a0: xx\n{doubling('${{.a{0}}}${{..s[a{0}]}}', 31, '  ')}", "cannot be resolved"),
    "doubling names that are put together": (
        "a0: xx\n" + "".join(f"n{i}: a{i}\n" for i in range(31)) + doubling("${{${{n{0}}}}}${{${{n{0}}}}}", 31),
        "nested references may resolve",
    ),
    "doubling with resolvers": (
        f"a0: xx\n{doubling('${{oc.select:a{0}}}${{oc.select:a{0}}}', 31)}",
        "nested references may resolve",
    ),
    "doubling an environment": (f"a0: ${{oc.env:LONG}}\n{doubling('${{a{0}}}${{a{0}}}', 8)}", "cannot be resolved"),
    "a chain": (f"a0: 1\n{doubling('${{a{0}}}', 1000)}", "has more than 32 keys"),
    "a chain, from its end": (
        "".join(f"a{i}: ${{a{i + 1}}}\n" for i in range(1000)) + "a1000: 1",
        "has more than 32 keys",
    ),
    "an interpolation of nothing": ("model: ${nothing}", "cannot be resolved"),
    "an interpolation cut short": ("model: ${", ""),
    "an unknown resolver": ("model: ${exec:id}", "cannot be resolved"),
    "sections that are lists": (GOOD.replace("trainer:", "trainer: []\nx:"), "trainer"),
    "sections that are null": ("model:\ndata:\nrewards:\n", "model"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("text", "says"), HOSTILE.values(), ids=HOSTILE)
def test_whatever_stands_in_the_file_is_refused_in_words(write, monkeypatch, text, says):
    monkeypatch.setenv("LONG", "x" * 10_000)
    error = refusal(write(text))
    assert error.what
    assert re.search(f"(?s){says}", str(error)), error


@pytest.mark.parametrize(
    "override", [f"model.path={DEEP}", f"data.options={'{a: ' * 5000}", 'model.path="a\\0b"', "model.path=\udcff"]
)
def test_so_is_whatever_stands_in_an_override(good, override):
    assert refusal(good, override).what
