r"""Read the answer of a mathematical response, and write it in one form.

The answer is read from the text after the last ``</think>``. It is the last complete ``\boxed{...}``, else the last
``<answer>...</answer>``, else all of the text if that is short and has no words, else the last formula or number.
Numbers that are joined by ``and`` or ``or`` are one answer. Nothing here evaluates anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s*(?P<short>[^\s{\\])|\\.|[{}]")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "inch": "inch inches",
        "foot": "ft foot feet",
        "mile": "mi mile",
        "mg": "mg milligram",
        "g": "g gram",
        "kg": "kg kilogram",
        "ms": "ms millisecond",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "year": "year yr",
        "ml": "ml milliliter millilitre",
        "l": "l liter litre",
        "cent": "cent",
        "dollar": "dollar",
    }.items()
    for name in names.split()
}
"""Units that distinguish answers: the same number with another of these units is another answer."""
_KNOWN = "|".join(sorted(_UNITS, key=len, reverse=True))
_NUMBER = r"\d+(?:[ ]?,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+"
_SIGNED = rf"[-+\u2212]?\s?(?:\\?[$\u20ac\u00a3])?\s?(?:{_NUMBER})(?:\s+\d+/\d+|\s?/\s?\d+)?\s?(?:\\?%)?"
_LAST = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<!\\)\$(?P<inline>(?![\d.,]+\s)[^$\n]*[^$\s\\])\$(?!\d)"
    rf"|(?P<point>[(\[]\s*{_SIGNED}(?:\s*,\s*{_SIGNED})+\s*[)\]])"
    rf"|(?P<plain>(?<![\w.]){_SIGNED}(?:\s*,?\s*\b(?:and|or)\s+{_SIGNED})*(?:\s*(?:{_KNOWN})s?\b)?)",
    re.DOTALL,
)
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!and\b|or\b|percent\b)[a-zA-Z]{3,}")
_IN_SIGNS = ("display", "bracket", "paren", "inline")
LONGEST_BARE = 60
"""Most characters of a response that as a whole can be the answer."""
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d])")
_MIXED = re.compile(r"(?<![\d.}/^_])(\d+)\s*(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=\s)(\d+)/(\d+))(?!\d)")
_ASSIGNED = re.compile(
    r"^(?:[a-zA-Z]|\\[a-zA-Z]+|[a-zA-Z]\([a-zA-Z]\)|[a-zA-Z]_\{?\w+\}?)\s*(?:=|\\in\b|\\approx\b)\s*(?=\S)"
)
_JOINED = re.compile(r",|;|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|\\(?:land|lor)\b|\\pm\b")
WORDED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d}\s)])\s*(\^?\{?\\?(?:circ|degree)\}?|\u00b0|[a-zA-Z\u00b5]+(?:\s+(?:per\s+)?[a-zA-Z]+)*(?:\s*[\^/]\s*\{?\w+\}?)*)\.?$"
)


@dataclass(frozen=True)
class Written:
    """An answer in a normal form.

    Attributes:
        elements: Elements of the answer, more than one for a set or a list; each is LaTeX without text, unit and
            currency sign.
        percent: Whether a percent sign followed each element.
        unit: The unit, if the same number in another unit would be another answer; else empty.
    """

    elements: tuple[str, ...]
    percent: bool = False
    unit: str = ""


def last_answer(response: str) -> str | None:
    r"""Find the answer in a response; None if there is no answer.

    If there are several boxes, the last complete box counts; if boxes are nested, the outer box counts.
    """
    text = response.rpartition("</think>")[2]
    boxed = _last_box(text)
    if boxed is not None:
        return boxed
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1])
    bare = text.strip().rstrip(".")
    found = [match for match in _LAST.finditer(text) if match[0].strip()]
    in_signs = any(match.lastgroup in _IN_SIGNS for match in found)
    if bare and len(bare) <= LONGEST_BARE and "\n" not in bare and not _WORD.search(bare) and not in_signs:
        return bare
    return next((one for one in found[-1].groups() if one is not None), None) if found else None


def _last_box(text: str) -> str | None:
    """Find the box that is closed last: of a box in a box the outer one."""
    last: str | None = None
    open_braces: list[int | None] = []  # where the content of a box begins; None for other braces
    for match in _BRACE.finditer(text):
        if match["box"]:
            open_braces.append(match.end())
        elif match["short"]:
            last = match["short"]
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces:
            begin = open_braces.pop()
            last = last if begin is None else text[begin : match.start()]
    return last


def written(answer: str) -> Written:
    r"""Convert an answer to its normal form.

    Money (``\$18``, ``18 dollars``), thousands (``1,234``, ``1{,}234``), percent signs, units, ``x =``, spaces, text
    and the braces of a set are removed; mixed numbers become sums. A list at the top level has several elements.
    """
    text = _plain(answer)
    text = _ASSIGNED.sub("", text).strip()
    inner = _set_inside(text)
    text = text if inner is None else inner
    if inner is None and _whole(text, "(", "["):
        return Written((text,))  # a tuple, a point, an interval, or one number in parentheses
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    parts = _split(text)
    if len(parts) == 1 and "\\pm" in text:
        before, _, behind = text.partition("\\pm")
        parts = [f"{before}+{behind}", f"{before}-{behind}"]
    read = [_element(part) for part in parts]
    units = {unit for _, _, unit in read if unit}
    return Written(
        tuple(dict.fromkeys(element for element, _, _ in read)),
        percent=all(percent for _, percent, _ in read),
        unit=units.pop() if len(units) == 1 else "",
    )


def _plain(answer: str) -> str:
    text = answer.strip().replace("\u2212", "-").replace("\u00d7", "\\times ").replace("\u00b7", "\\cdot ")
    text = text.replace("**", "") if text.startswith("**") else text
    text = re.sub(r"\\[dt]frac\b", r"\\frac", text)
    text = re.sub(r"\\(?:left|right|displaystyle)\b\s*", "", text)
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", " ").replace("\\;", " ").replace("\\ ", " ")
    text = text.replace("~", " ").replace("\\quad", " ").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", text) if re.fullmatch(r"[-+]?\d{1,3}( \d{3})+", text) else text
    text = re.sub(r"[$\u20ac\u00a3]", "", text)
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)(?!\w)", r"\\times 10^{\1}", text)
    text = WORDED.sub(lambda found: f" {found[1]} ", text)
    return text.strip().rstrip(".;,").strip()


def _set_inside(text: str) -> str | None:
    for opening, closing in (("\\{", "\\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip()
    return None


def _whole(text: str, *openings: str) -> bool:
    return text.startswith(openings) and text.endswith((")", "]")) and "," in text


def _split(text: str) -> list[str]:
    """Split at commas, ``and`` and ``or`` outside of brackets."""
    depth, begin, parts = 0, 0, []
    for place, letter in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        joined = None if depth else _JOINED.match(text, place)
        if (
            joined
            and joined[0] != "\\pm"
            and place >= begin
            and not (joined[0].isalpha() and text[place - 1 : place].isalpha())
        ):
            parts.append(text[begin:place])
            begin = joined.end()
    parts.append(text[begin:])
    return [part for one in parts if (part := one.strip())] or [""]


def _element(part: str) -> tuple[str, bool, str]:
    text = _ASSIGNED.sub("", part).strip()
    percent = text.endswith(("%", "percent"))
    text = text.removesuffix("percent").rstrip("% ").strip()
    unit = ""
    if re.match(r"[-+.\d\\(]", text) and (found := _UNIT.search(text)):
        word = found[1].split()[0].split("^")[0].split("/")[0].lower()
        known = _UNITS.get(word) or _UNITS.get(word.removesuffix("s")) or ""
        if known or len(word) > 1 or not found[1].isalpha():
            text, unit = text[: found.start()].strip(), known if found[1].isalpha() else ""
    text = _MIXED.sub(lambda m: f"({m[1]}+\\frac{{{m[2] or m[4]}}}{{{m[3] or m[5]}}})", text)
    return re.sub(r"\s+", " ", text), percent, unit
