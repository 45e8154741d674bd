"""Make a prompt from a row: the role of each column, messages, tools, and images inside of an allowed folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError, did_you_mean
from anytron.base.files import exhausted
from anytron.config.json_files import parse_json
from anytron.task.data.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.config.data import ReadingOptions
    from anytron.task.data.rows import Row
    from anytron.task.data.vision import Picture

PARTS = ("prompt", "images", "tools")
"""Columns that become parts of the prompt itself, and not of its data; the column ``id`` becomes both."""


def prompt_of(row: Row, options: ReadingOptions, prefix: str = "") -> Prompt:
    """Make the prompt of a row; columns that are not part of the prompt become its data.

    Args:
        row: A row of a file.
        options: Options that select columns.
        prefix: Prefix of the name of a row that has no ``id``.

    Raises:
        DataError: A column is missing, or has a value of the wrong type.
    """
    values = _renamed(row, options.columns)
    if "prompt" not in values:
        raise _no_column(row, "prompt", "prompt")
    value, images, tools = (values.pop(part, None) for part in PARTS)
    if row.padded:
        value, tools = _without_nulls(value), _without_nulls(tools)
    pictures = _pictures(images, options, row)
    made: dict[str, Any] = {"images": pictures, "data": values, "tools": _tools(tools, row.where)}
    name = prefix + row.name if values.get("id") is None else str(values["id"])
    if isinstance(value, str):
        if not options.chat:
            return Prompt(name, text=value, **made)
        value = [user_message(value, len(pictures))]
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return Prompt(name, messages=conversation(value, options.system, row.where), **made)
    if isinstance(value, list) and all(type(token) is int for token in value):
        return Prompt(name, tokens=tuple(value), **made)
    raise DataError(
        "A prompt is neither a string nor a list of messages or token ids.",
        where=row.where,
        why=f"its type is {_kind(value)}",
        fix="name the right column in the source's option `columns`: {prompt: COLUMN}",
    )


def _kind(value: Any) -> str:
    """Name the type of a value; of a list, those of its entries too."""
    if not isinstance(value, list) or not value:
        return type(value).__name__
    return f"list of {', '.join(sorted({type(entry).__name__ for entry in value}))}"


def user_message(text: str, images: int) -> dict[str, Any]:
    """Make a user's message: the images, and then the text."""
    if not images:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]}


def inside(folder: Path, path: str, where: str) -> Path:
    """Return the absolute path of a file below a folder.

    Raises:
        DataError: The path leads out of the folder, after following links, or is not valid.
    """
    file = folder / path
    try:
        leaves = not file.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name that is too long, links in a circle
        why, fix = f"{path!a}: {error}", "give the path of an image file"
        raise exhausted(error) or DataError(
            "The path of an image cannot be used.", where=where, why=why, fix=fix
        ) from error
    if leaves:
        raise DataError(
            "The path of an image leads out of its folder.",
            where=where,
            why=f"{path!a} is not inside of {folder}",
            fix="set the source's option `image_folder` to a folder that holds all images",
        )
    return file


def _renamed(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a row by the names under which they are used."""
    record = row.record
    if not isinstance(record, dict):
        raise DataError(
            "A row of the prompts is not an object.",
            where=row.where,
            why=f"its type is {type(record).__name__}",
            fix="write each row as an object: {...}",
        )
    taken = {name: _value(row, name, column) for name, column in columns.items()}
    rest = {name: value for name, value in record.items() if name not in columns.values()}
    return {**rest, **taken}


def _value(row: Row, name: str, column: str) -> Any:
    if column in row.record:
        return row.record[column]
    value: Any = row.record
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise _no_column(row, name, column)
        value = value[part]
    return value


def _no_column(row: Row, name: str, column: str) -> DataError:
    known = [str(one) for one in row.record]
    hint = did_you_mean(column, known)
    return DataError(
        f"A row of the prompts has no column {column!r}.",
        where=row.where,
        why=f"its columns are {', '.join(map(repr, known))}" if known else "it has no columns",
        fix=f"name the right column in the source's option `columns`: {{{name}: COLUMN}}{f' ({hint})' if hint else ''}",
    )


def conversation(messages: list[dict[str, Any]], system: str | None, where: str) -> tuple[dict[str, Any], ...]:
    """Check the messages of a prompt, and begin them with a system message unless they begin with one.

    Args:
        messages: Objects with role and content; at least one.
        system: Text of the system message; None = none is added.
        where: Place of the prompt, for errors.

    Raises:
        DataError: A message has no usable role or content.
    """
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        content = "" if content is None and message.get("tool_calls") else content
        if not isinstance(role, str) or not isinstance(content, (str, list)):
            types = f"a role of type {type(role).__name__} and a content of type {type(content).__name__}"
            why = f"message {number} has {types}"
            fix = "give each message a role, which is a text, and a content, which is a text or a list of parts"
            raise DataError("A message of a prompt has no usable role or content.", where=where, why=why, fix=fix)
    if system is None or messages[0]["role"] == "system":
        return tuple(messages)
    return ({"role": "system", "content": system}, *messages)


def _tools(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    """Read tools from a list or JSON text; in Arrow's lists, each tool would get the parameters of all others."""
    if value is None or value == "":
        return ()
    try:
        tools = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        fix = "give a list of objects, or such a list as JSON text"
        raise DataError("The tools of a prompt are not JSON.", where=where, why=str(error), fix=fix) from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        fix = "give a list of objects, or such a list as JSON text"
        why = f"their type is {_kind(tools)}"
        raise DataError("The tools of a prompt are not a list of objects.", where=where, why=why, fix=fix)
    return tools


def _without_nulls(value: Any) -> Any:
    """Leave out entries that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _pictures(value: Any, options: ReadingOptions, row: Row) -> tuple[Picture, ...]:
    """Images as paths, as the bytes of a file, or as Hugging Face's ``{bytes, path}``; a single one or a list."""
    if value is None or value == "":
        return ()
    folder = Path(options.image_folder or row.folder)
    return tuple(_picture(one, folder, row.where) for one in (value if isinstance(value, list) else [value]))


def _picture(value: Any, folder: Path, where: str) -> Picture:
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return inside(folder, value, where)
    fix = "give a path, a list of paths, or Hugging Face's {bytes, path}"
    why = f"its type is {type(value).__name__}"
    raise DataError("An image of a prompt is neither a path nor a picture.", where=where, why=why, fix=fix)
