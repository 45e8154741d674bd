"""The functions that users write: how each kind is called, what it must return, and the error if it fails.

Every function or class that a configuration names by ``file.py:name`` or ``module:name`` has a :class:`Kind`, and
:func:`anytron.config.imports.resolve` checks it against that kind before anything starts. The kind's :class:`Called`
describes later failures in terms of the user's file and the function's arguments, not of Anytron's code.
"""

from __future__ import annotations

import importlib
import inspect
import os
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.base.errors import AnytronError, ConfigError, DataError
from anytron.base.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_OURS = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen importlib", str(importlib.__file__))
"""Beginnings of the file names of the frames that come before a user's frames in a traceback."""


class Fault(NamedTuple):
    """What is wrong with a user's function: ``what``, ``why`` and ``fix`` of an error."""

    what: str
    why: str
    fix: str

    def error(self, where: str, kind: type[AnytronError] = DataError) -> AnytronError:
        """Return the error; ``where`` is the key that names the function, or the prompt or row it was called for."""
        return kind(self.what, where=where, why=self.why, fix=self.fix)


@dataclass(frozen=True)
class Called:
    """How a user's function, or a method of a user's class, is called.

    Attributes:
        name: Noun for the function, as the beginning of a sentence: ``A reward function``.
        takes: Names of its positional arguments, without ``self``.
        given: Description of these arguments, as a sentence without a full stop.
        gives: What it must return, as a phrase that follows "return".
        method: Name of the method; empty = it is a function.
        optional: Whether a class may lack the method.
        awaited: Whether the function may be async.
    """

    name: str
    takes: tuple[str, ...] = ()
    given: str = ""
    gives: str = "nothing"
    method: str = ""
    optional: bool = False
    awaited: bool = False

    @property
    def signature(self) -> str:
        """The positional arguments in parentheses, after the name of the method if there is one."""
        return f"{self.method}({', '.join([*(['self'] if self.method else []), *self.takes])})"

    def misfit(self, function: Any, options: Iterable[str] = (), *, bound: bool = True) -> Fault | None:
        """Return why a function cannot be called this way (it is async, or its arguments differ); None if it can.

        Args:
            function: The user's function.
            options: Names of keyword arguments that are passed too.
            bound: False for a method of a class that has no instance yet.
        """
        named = list(options)
        called = _called(function)  # not what is behind decorators: one may wait for what is async
        called = called.__init__ if inspect.isclass(called) else called
        is_async = inspect.iscoroutinefunction(called) and not self.awaited
        if is_async or inspect.isasyncgenfunction(called):
            return Fault(
                f"{self.name} is async.",
                f"{place(function)}, is async, and is called without await",
                "write def instead of async def; inside it, call async functions with asyncio.run()",
            )
        try:
            takes = inspect.signature(function)
        except (TypeError, ValueError):
            return None  # functions written in C may have no signature; the first call tells
        try:
            takes.bind(*([] if bound else ["self"]), *self.takes, **dict.fromkeys(named))
        except TypeError as error:
            given = f"({', '.join([*self.takes, *(f'{name}=...' for name in named)])})"
            wanted = "no argument" if given == "()" else given
            fix = f"write {self.signature}" if self.method else f"let it take {wanted}"
            fix += ", or correct its options" if named else ""
            return Fault(
                f"{self.name} does not accept the arguments that it is called with.",
                f"{error}; it takes {takes} ({place(function)}), and is called with {given}",
                self.advised(fix),
            )
        return None

    def raised(self, error: BaseException, function: object) -> Fault:
        """Return the fault of a function that raised: the exception, the line of the user's file, and the traceback."""
        line = _line(error, function)
        said = "".join(f": {text}" for text in str(error).strip().splitlines()[:1])
        headline = _writable(f"{type(error).__name__}{said}")
        if not isinstance(error, Exception):
            fix = "let it return instead of exiting; if it calls a program that exits, run the program with subprocess"
            return Fault(f"{self.name} tried to end its process.", f"{headline} ({line})\n{traced(error)}", fix)
        fix = self.advised(f"correct {line}")
        return Fault(f"{self.name} raised an exception.", f"{headline} ({line})\n{traced(error)}", fix)

    def unusable(self, function: object, returned: str, what: str = "") -> Fault:
        """Return the fault of a function that returned an invalid value.

        Args:
            function: The user's function.
            returned: What it returned, as a phrase that follows "returned".
            what: The headline of the error; empty = "(name) returned an invalid value."
        """
        fix = self.advised(f"return {self.gives}")
        return Fault(
            what or f"{self.name} returned an invalid value.", f"it returned {returned} ({place(function)})", fix
        )

    def returned_async(self, function: object, found: object) -> Fault | None:
        """Return the fault of a function that returned an awaitable (it is closed here); None for any other value."""
        returned = f"{type(found).__name__}, which is async, and is called without await"
        return self.unusable(function, returned) if is_async(found) else None

    @contextmanager
    def guard(self, function: object, where: str, kind: type[AnytronError] = DataError) -> Iterator[None]:
        """Convert what a function raises in the block into an error that names the function.

        Args:
            function: The user's function.
            where: ``where`` of the error: the key, prompt or row that the function was called for.
            kind: Class of the error.

        Raises:
            AnytronError: The function raised this error itself, or it raised another exception, which becomes an error
                of ``kind``. The original exception is the cause of that error, so that a worker can recognise that a
                device ran out of memory.
            OSError: The function raised an OSError that says that the machine ran out of a resource, such as disk
                space.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, AnytronError) or exhausted(error) is not None:
                raise
            raise self.raised(error, function).error(where, kind) from error

    def call(
        self, function: Callable[..., Any], where: str, *given: object, kind: type[AnytronError] = DataError
    ) -> Any:
        """Call a function in this process; arguments and errors as for :meth:`guard`."""
        with self.guard(function, where, kind):
            found = function(*given)
        if fault := self.returned_async(function, found):
            raise fault.error(where, kind)
        return found

    def advised(self, fix: str) -> str:
        """Return the remedy ``fix``, followed by a description of the arguments that the function is given."""
        return f"{fix}; {self.given}" if self.given else fix


@dataclass(frozen=True)
class Kind:
    """The kind of function or class that a key of the configuration names.

    Attributes:
        key: The key, with ``[]`` after a list.
        call: How the named function is called.
        methods: Methods that an instance must have, if the key may name a class; empty = the key names a function.
        made: How such a class is instantiated; None = it is called like a function, as ``call`` says.
        options: Whether the entries of ``options`` next to the key are passed as keyword arguments, too.
    """

    key: str
    call: Called
    methods: tuple[Called, ...] = ()
    made: Called | None = None
    options: bool = False

    def check(self, found: Any, key: str, options: Iterable[str] = (), *, methods: bool = True) -> None:
        """Check that the object that a key names can be called as this kind requires.

        Args:
            found: The object that the key names.
            key: The key, as it stands in this configuration.
            options: Names of keyword arguments that are passed.
            methods: Whether to check the methods of a class too.

        Raises:
            ConfigError: ``found`` is async, has the wrong arguments, or lacks a method.
        """
        is_class = inspect.isclass(found) and bool(self.methods)
        fault = (self.made or self.call if is_class else self.call).misfit(found, options)
        where = f"{key}, with its options" if self.options and fault else key
        for method in self.methods if is_class and methods else ():
            fault = fault or _misfit_of_method(method, found)
        if fault is not None:
            raise fault.error(where, ConfigError)


def _misfit_of_method(method: Called, cls: type) -> Fault | None:
    own = any(method.method in vars(one) for one in cls.__mro__)  # getattr() would find __call__ of the metaclass
    function = getattr(cls, method.method) if own else None
    if not callable(function) or getattr(function, "__isabstractmethod__", False):
        if method.optional and function is None:
            return None
        fix = method.advised(f"write {method.signature}")
        return Fault(f"{method.name} is missing.", f"{place(cls)}, has no method {method.signature}", fix)
    return method.misfit(function, bound=not inspect.isfunction(inspect.getattr_static(cls, method.method)))


def has(cls: Any) -> str:
    """Return a phrase that lists the fields of a dataclass, for :attr:`Called.given`."""
    names = [one.name for one in fields(cls)] + [name for name, one in vars(cls).items() if isinstance(one, property)]
    return f"{'an' if cls.__name__[0] in 'AEIO' else 'a'} {cls.__name__} has {', '.join(names)}"


def is_async(found: object) -> bool:
    """Whether an object must be awaited. A coroutine is closed, because it would warn that it was never awaited."""
    if inspect.iscoroutine(found):
        found.close()
    return inspect.isawaitable(found) or inspect.isasyncgen(found)


def place(function: object) -> str:
    """Name a function or class with its line and file."""
    inner = _inner(function)
    name = inner.__qualname__
    try:
        return f"{name}, line {inspect.getsourcelines(inner)[1]} of {inspect.getsourcefile(inner)}"
    except (OSError, TypeError):  # written in C, or made of text
        return f"{name}, of module {getattr(inner, '__module__', None)}"


def traced(error: BaseException) -> str:
    """Return the traceback of an error in a user's code as text, without the leading frames of Anytron."""
    first = trace = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    shown = None if isinstance(error, SyntaxError) else trace  # it names its line itself
    found = traceback.TracebackException(type(error), error, first or shown)
    return _writable("".join(found.format()).rstrip())


def _writable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _line(error: BaseException, function: object) -> str:
    """The line of the function's file in which it raised; where it is defined if no line of that file was running."""
    try:
        file = inspect.getsourcefile(_inner(function))
    except TypeError:
        file = None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {frames[-1].lineno} of {file}" if frames else place(function)


def _called(function: Any) -> Any:
    """The function that a call runs: partial() is unwrapped, and a callable object gives its ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def _inner(function: object) -> Any:
    """The function or class in the user's file, without decorators around it."""
    return inspect.unwrap(_called(function))
