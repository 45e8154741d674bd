"""Find the function that a configuration names: registered, in a module, or in a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, did_you_mean
from anytron.base.files import exhausted
from anytron.base.functions import traced
from anytron.config.diagnostics import Diagnostic, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from anytron.base.functions import Kind

NOTHING_REGISTERED: Mapping[str, Callable[..., Any]] = MappingProxyType({})


def resolve(
    reference: str,
    kind: Kind,
    *,
    key: str = "",
    registered: Mapping[str, Callable[..., Any]] = NOTHING_REGISTERED,
    options: Iterable[str] = (),
) -> Callable[..., Any]:
    """Return the function that a reference names, checked to be callable as its kind requires.

    Args:
        reference: A registered name, ``module:function``, or ``path/to/file.py:function``. A file is
            run once per process, however many references name it.
        kind: What the function must accept.
        key: The configuration key that holds the reference, for error messages; empty = the key of ``kind``.
        registered: Functions by registered name.
        options: Names of the keyword arguments that the function will be given.

    Raises:
        ConfigError: The name, file, module or function does not exist, cannot be called as its kind requires, or the
            module fails to import (the original error is chained).
    """
    key = key or kind.key
    location, colon, attribute = reference.rpartition(":")
    if not colon:
        if reference in registered:
            kind.check(registered[reference], key, options, methods=False)
            return registered[reference]
        raise ConfigError(
            f"{reference!r} is not registered.",
            where=key,
            why=f"the registered names are {', '.join(sorted(registered))}" if registered else "no name is registered",
            fix=did_you_mean(reference, registered) or "use a registered name, 'module:function' or 'file.py:function'",
        )
    refuse(missing(reference, key))
    module = _from_file(location, key) if location.endswith(".py") else _from_module(location, key)
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{location} has no {attribute!r}.",
            where=key,
            why=f"the module {module.__file__} does not define this name",
            fix=did_you_mean(attribute, vars(module)) or "name a function or a class of that module",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{reference} is not a function.",
            where=key,
            why=f"its type is {type(function).__name__}, in {module.__file__}",
            fix=f"name a function that takes {kind.call.signature}",
        )
    kind.check(function, key, options)
    return function  # type: ignore[no-any-return]


def missing(reference: str, key: str) -> Iterator[Diagnostic]:
    """Yield an error if the file or module that a reference names does not exist. Nothing is imported.

    Registered names are not checked.

    Args:
        reference: As for :func:`resolve`.
        key: The configuration key that holds it.
    """
    location, colon, _ = reference.rpartition(":")
    if not colon:
        return
    if location.endswith(".py"):
        if not Path(location).is_file():
            here = _in_this_directory(location)
            fix = "correct the path, which is relative to the YAML file" + here
            yield Diagnostic("error", key, f"there is no file {location}", fix)
    elif not location or importlib.util.find_spec(location.partition(".")[0]) is None:
        fix = "install it, or name a file: 'path/to/file.py:function', relative to the YAML file"
        yield Diagnostic("error", key, f"there is no module {location!r}", fix)


def _in_this_directory(location: str) -> str:
    """Name the file that was meant by a path relative to the current directory, which is what shells complete."""
    parts = Path(location).parts
    ends = (Path.cwd().joinpath(*parts[start:]) for start in range(1, len(parts)))
    meant = next((end for end in ends if end.is_file()), None)
    return "" if meant is None else f"; for the file in the current directory, write {meant}"


def _from_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise exhausted(error) or ConfigError(
            f"Module {name} fails to import.",
            where=key,
            why=f"{type(error).__name__}: {error}\n{traced(error)}",
            fix="correct it, or install what it imports",
        ) from error


def _from_file(location: str, key: str) -> ModuleType:
    path = Path(location).resolve()
    # Registered under a name that no package has, so that dataclasses and pickles of the file work
    # and a second reference to it finds the same module.
    name = f"anytron_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise exhausted(error) or ConfigError(
            f"{location} fails to run.",
            where=key,
            why=f"{type(error).__name__}: {error}\n{traced(error)}",
            fix="correct it, or install what it imports",
        ) from error
    return module
