"""The start time of a run, which chat templates may show: it is taken once, stored, and restored on resume.

The time is inserted into the template's text, because transformers renders a template with plain data only: a function
could not replace its clock.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Mapping

CLOCK = "strftime_now"
"""The function by which a chat template reads the clock (transformers, ``utils/chat_template_utils.py``)."""
_DIRECTIVE = re.compile(r"%([-_0^#]*)[EO]?([a-zA-Z%])")
_FORMAT = re.compile(CLOCK + r"""\(\s*(?:'([^']*)'|"([^"]*)")""")
_LETTERS = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"
"""Directives of the C library."""
_PERCENT = "\ue000"
"""Stands for a percent sign while directives are replaced."""
_COMPOSITE = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}
"""Directives that depend on the locale, and what they stand for in the locale C (POSIX.1-2017, ``strftime``)."""
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def present() -> datetime:
    """The current time, in the time zone of the process."""
    return datetime.now().astimezone()


class Beginning(BaseModel):
    """The start time of a run, and the chat template with which the run started."""

    model_config = ConfigDict(frozen=True)

    now: datetime
    """The start time, with the offset of its time zone; templates show it as local time."""
    chat_template: str | dict[str, str] | None = None
    """The chat template of the tokenizer, or several templates by their names; null if it has none."""

    @classmethod
    def of(cls, tokenizer: Any) -> Beginning:
        """Make the beginning of a run that starts now.

        Args:
            tokenizer: A Hugging Face tokenizer.
        """
        return cls(now=present(), chat_template=tokenizer.chat_template)

    @property
    def shown(self) -> dict[str, str]:
        """For each time format that the chat template uses, the start time as text in that format."""
        formats = [single or double for single, double in _FORMAT.findall(str(self.chat_template))]
        return {form: self.strftime(form) for form in formats}

    @property
    def reads_the_clock(self) -> bool:
        """Whether the template shows the current time."""
        return CLOCK in str(self.chat_template)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the further arguments of a chat template, so that its clock shows the start time of the run.

        Args:
            given: The arguments in the configuration, which may include the template.
        """
        template = given.get("chat_template")
        template = _chosen(self.chat_template if template is None else template, self.chat_template)
        if CLOCK not in template:
            return dict(given)
        return {**given, "chat_template": self._clock(template + str(given)) + template}

    def strftime(self, form: str) -> str:
        """Format the start time as ``datetime.strftime`` does in the locale C, whatever locale the process has.

        Like transformers' clock it has no time zone: ``%z`` and ``%Z`` are empty.
        """
        return _DIRECTIVE.sub(lambda found: self._directive(found[1], found[2]), form)

    def _clock(self, text: str) -> str:
        """Write the clock as a macro of Jinja, which replaces each directive in a format by what it stands for.

        Args:
            text: Text that contains all directives with flags that formats use.
        """
        directives = [f"%{letter}" for letter in _LETTERS]
        directives += sorted({found[0] for found in _DIRECTIVE.finditer(text)} - {*directives, "%%"})
        replaced = "".join(f"|replace('{one}', '{_quoted(self.strftime(one))}')" for one in directives)
        formula = f"format|replace('%%', '{_PERCENT}'){replaced}|replace('{_PERCENT}', '%')"
        # transformers drops the line's end behind a tag: what follows stands at the beginning of a line as before.
        return f"{{% macro {CLOCK}(format) %}}{{{{ {formula} }}}}{{% endmacro %}}\n"

    def _directive(self, flags: str, letter: str) -> str:
        if letter in _COMPOSITE:
            return self.strftime(_COMPOSITE[letter])
        wall = self.now.replace(tzinfo=None)
        day, month, half = _DAYS[wall.weekday()], _MONTHS[wall.month - 1], "AM" if wall.hour < 12 else "PM"
        texts = {"A": day, "a": day[:3], "B": month, "b": month[:3], "h": month[:3], "p": half, "P": half.lower()}
        texts["s"] = str(int(self.now.timestamp()))
        text = texts.get(letter)
        if text is None:
            return wall.strftime(f"%{flags}{letter}")
        return text.upper() if "^" in flags else text


def _chosen(template: str | Mapping[str, str] | None, named: str | Mapping[str, str] | None) -> str:
    """Return the text of the template that is applied, one of several by its name or as transformers chooses it.

    Args:
        template: Text of a template, name of one, or all templates by their names.
        named: Templates of the tokenizer.
    """
    if isinstance(template, str):
        return template if named is None or isinstance(named, str) else named.get(template, template)
    several = template or {}
    default = several.get("default", "")
    return (
        f"{{% if tools %}}\n{several['tool_use']}{{% else %}}\n{default}{{% endif %}}"
        if "tool_use" in several
        else default
    )


def _quoted(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")
