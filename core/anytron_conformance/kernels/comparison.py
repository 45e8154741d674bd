"""Call a kernel and its definition with the same operands, and compare results and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.device.platform import Feature
from anytron_conformance.compare import assert_close
from anytron_conformance.rules import Broken, Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from anytron_conformance.subject import Subject


@dataclass(frozen=True)
class Comparison:
    """A kernel, its definition, and the operands of both.

    Attributes:
        kernel: Called with the operands on the device, in ``dtype``.
        definition: Called with the same numbers in float64, on the host.
        operands: Operands, float, on the host, by their names in messages: ``keys``.
        dtype: Element type of the operands that the kernel gets.
        outputs: Names of the results, in messages: ``output``.
        result_dtype: Element type of the results; None = as ``dtype``.
        in_float32: Names of operands that are float32 whatever ``dtype`` is.
        frozen: Names of operands for which no gradient is requested.
        meaningless: Rows of operands whose numbers must not matter, by the operand's name: bool, over its first
            dimensions. They get no gradient.
        garbage: Value with which the rows in ``meaningless`` are filled.
        empty: Rows of the results that must be 0: bool, over the results' first dimensions. Their incoming gradient is
            not 0.
        because: Why the rows in ``empty`` are 0, for the message.
        lay: Function that copies operands and incoming gradients to a memory layout that callers of a kernel may use.
        factor: Factor of the usual tolerance.
    """

    kernel: Callable[..., Tensor | tuple[Tensor, ...]]
    definition: Callable[..., Tensor | tuple[Tensor, ...]]
    operands: Mapping[str, Tensor]
    dtype: torch.dtype
    outputs: Sequence[str] = ("output",)
    result_dtype: torch.dtype | None = None
    in_float32: Sequence[str] = ()
    frozen: Sequence[str] = ()
    meaningless: Mapping[str, Tensor] = field(default_factory=dict)
    garbage: float = 7.0
    empty: Tensor | None = None
    because: str = "there is padding or no key"
    lay: Callable[[Tensor], Tensor] = torch.Tensor.contiguous
    factor: float = 1.0

    def hold(self, subject: Subject) -> None:
        """Call the kernel, differentiate, and compare.

        Raises:
            Broken: A result has the wrong dtype, device or value, a gradient is missing, zero or wrong, or an operand
                was overwritten.
        """
        self.call(subject).differentiate()

    def call(self, subject: Subject) -> Called:
        """Call the kernel, and compare results. Raises as :meth:`hold`."""
        exact = {name: self._cleaned(name).double().requires_grad_() for name in self.operands}
        expected = _as_tuple(self.definition(*exact.values()))
        given = {name: self._given(name, subject.device) for name in self.operands}
        for name in self.trained:
            given[name].requires_grad_()
        before = {name: one.detach().clone() for name, one in given.items()}
        results = _as_tuple(self.kernel(*given.values()))
        self._check_results(results, expected, subject.device)
        return Called(self, exact, expected, given, before, results)

    @property
    def trained(self) -> list[str]:
        """The operands for which a gradient is requested."""
        return [name for name in self.operands if name not in self.frozen]

    @property
    def result(self) -> torch.dtype:
        """The dtype of the results."""
        return self.dtype if self.result_dtype is None else self.result_dtype

    def _rounded(self, name: str) -> Tensor:
        return self.operands[name].to(torch.float32 if name in self.in_float32 else self.dtype)

    def _cleaned(self, name: str) -> Tensor:
        rows = self.meaningless.get(name)
        return self._rounded(name) if rows is None else _filled(self._rounded(name), rows, 0.0)

    def _given(self, name: str, device: torch.device) -> Tensor:
        rows = self.meaningless.get(name)
        numbers = self._rounded(name) if rows is None else _filled(self._rounded(name), rows, self.garbage)
        return self.lay(numbers.to(device))

    def _check_results(self, results: Sequence[Tensor], expected: Sequence[Tensor], device: torch.device) -> None:
        if len(results) != len(expected):
            raise Broken(f"The kernel gives {len(results)} results, the contract says {len(expected)}.")
        for name, found, want in zip(self.outputs, results, expected, strict=True):
            if found.dtype != self.result:
                raise Broken(f"The {name} has the wrong dtype.", f"it is {found.dtype}, expected {self.result}")
            if found.device != device:
                raise Broken(f"The {name} is on another device.", f"it is on {found.device}, expected {device}")
            assert_close(found, want, f"The {name}", dtype=self.dtype, factor=self.factor)
            if self.empty is not None:
                _check_zero(found, self.empty, f"The {name} is not 0 where {self.because}.")
            if self.trained and not found.requires_grad:
                raise Broken(f"The {name} has no gradient: it does not depend on the operands any more.")


@dataclass(frozen=True)
class Called:
    """A kernel that has been called, before its backward pass."""

    comparison: Comparison
    exact: Mapping[str, Tensor]
    expected: Sequence[Tensor]
    given: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    results: Sequence[Tensor]

    def differentiate(self) -> None:
        """Compare gradients, if there are any. Raises as :meth:`Comparison.hold`."""
        if self.comparison.trained:
            self._compare_gradients()
        for name, one in self.given.items():
            if not torch.equal(one.detach().nan_to_num(), self.before[name].nan_to_num()):
                raise Broken(f"The kernel wrote over the {name} that it was given.")

    def _compare_gradients(self) -> None:
        asked = self.comparison
        incoming = [_incoming(one, asked.result, number) for number, one in enumerate(self.expected)]
        wanted = torch.autograd.grad(
            self.expected,
            [self.exact[name] for name in asked.trained],
            [one.double() for one in incoming],
            materialize_grads=True,
        )
        found = torch.autograd.grad(
            self.results,
            [self.given[name] for name in asked.trained],
            [asked.lay(one.to(self.results[0].device)) for one in incoming],
            allow_unused=True,
        )
        for name, mine, right in zip(asked.trained, found, wanted, strict=True):
            self._check_gradient(name, mine, right)

    def _check_gradient(self, name: str, found: Tensor | None, want: Tensor) -> None:
        what, asked = f"The gradient of the {name}", self.comparison
        if found is not None and want.any() and not found.any():
            raise Broken(f"{what} is zero.", f"expected up to {float(want.abs().max()):.3g}")
        assert_close(found, want, what, dtype=asked.dtype, factor=asked.factor)
        rows = asked.meaningless.get(name)
        if rows is not None and found is not None:
            _check_zero(found, rows, f"{what} is not 0 in padding.")


def _check_zero(found: Tensor, rows: Tensor, message: str) -> None:
    chosen = found.detach().cpu()[rows]
    if bool((chosen != 0).any()):
        raise Broken(message, f"it is up to {float(chosen.abs().max()):.3g}")


def _filled(numbers: Tensor, rows: Tensor, filling: float) -> Tensor:
    """Fill rows, given over the first dimensions."""
    return numbers.masked_fill(rows.view(*rows.shape, *[1] * (numbers.dim() - rows.dim())), filling)


def _incoming(expected: Tensor, dtype: torch.dtype, number: int) -> Tensor:
    """The gradient that arrives from the loss: another number for each entry."""
    return torch.randn(expected.shape, generator=torch.Generator().manual_seed(100 + number)).to(dtype)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    found = tuple(results) if isinstance(results, tuple | list) else (results,)
    for one in found:
        if not isinstance(one, Tensor):
            raise Broken(f"The kernel gives a {type(one).__name__}, the contract says a tensor.")
    return found


DTYPES = (torch.float32, torch.bfloat16)
"""Element types in which kernels are checked; bfloat16 only if the platform supports it."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal numbers, float32, on the host; equal on every rank and machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sliced(tensor: Tensor) -> Tensor:
    """Copy into every other entry of the last dimension of a larger tensor, so that nothing is contiguous.

    The entries between are NaN, so that a kernel that ignores strides reads NaN.
    """
    larger = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype, device=tensor.device)
    larger[..., 0] = tensor
    return larger[..., 0]


def split_off(tensor: Tensor) -> Tensor:
    """Copy into a part of a larger tensor, whose other part is NaN, as queries lie in the output of a fused projection.

    The larger tensor is twice as large in the last dimension but one (heads), or in the last of one or two.
    """
    heads = tensor.dim() >= 3
    halves = torch.full((2, *tensor.shape), torch.nan, dtype=tensor.dtype, device=tensor.device)
    larger = torch.cat(tuple(halves), dim=-2 if heads else -1)
    part = larger[..., tensor.shape[-2] :, :] if heads else larger[..., tensor.shape[-1] :]
    return part.copy_(tensor)


def in_dtypes(named: Iterable[tuple[str, object, tuple[Feature, ...]]]) -> Iterator[Case]:
    """Make a case of each (name, values, needs) in each of :data:`DTYPES`: all in the first dtype, then the next.

    The values of a case are (dtype, values).
    """
    listed = list(named)
    for dtype in DTYPES:
        for name, values, needs in listed:
            extra = (Feature.BFLOAT16,) if dtype is torch.bfloat16 else ()
            short = str(dtype).removeprefix("torch.")
            size = len(listed) * DTYPES.index(dtype) + listed.index((name, values, needs))
            yield Case(f"{name}, {short}" if name else short, (dtype, values), size, (*needs, *extra))
