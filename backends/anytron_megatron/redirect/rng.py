"""Redirect random numbers: ``torch.cuda``'s generators become the runtime's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from anytron.device.runtime import DeviceRuntime
    from anytron_megatron.redirect.devices import DeviceTranslator


def known_generator(runtime: DeviceRuntime) -> torch.Generator:
    """Return the device's generator.

    Raises:
        EngineError: torch has no access to it.
    """
    generator = runtime.default_generator()
    if generator is None:
        raise EngineError(
            "torch has no access to the device's random number generator.",
            where=f"device type {runtime.device_type}",
            why="the platform's runtime returns default_generator() = None",
            fix="override default_generator in the platform's runtime",
        )
    return generator


class RuntimeGenerators(Sequence[torch.Generator]):
    """Replace ``torch.cuda.default_generators``, which Megatron's RNG tracker indexes."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def __len__(self) -> int:
        return self._runtime.device_count()

    def __getitem__(self, index: Any) -> Any:
        # One process uses one device, so every index means the current one.
        return known_generator(self._runtime)


class RandomCalls:
    """The functions of ``torch.cuda.random``, under their own names.

    They seed the generator, and call ``runtime.manual_seed`` only if the generator is unknown: a runtime may implement
    that by torch.manual_seed, which calls torch.cuda.manual_seed_all.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        """Return the generator's state, uint8, on the host."""
        del device
        return self._runtime.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device: Any = "cuda") -> None:
        """Restore a state that :meth:`get_rng_state` returned."""
        del device
        self._runtime.set_rng_state(new_state)

    def get_rng_state_all(self) -> list[Tensor]:
        """Return the state of the one device that this process uses."""
        return [self._runtime.get_rng_state()]

    def set_rng_state_all(self, new_states: Sequence[Tensor]) -> None:
        """Restore the states that :meth:`get_rng_state_all` returned."""
        (state,) = new_states
        self._runtime.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        generator = self._runtime.default_generator()
        (self._runtime if generator is None else generator).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        self.manual_seed(seed)

    def seed(self) -> None:
        """Seed the device's generator at random."""
        known_generator(self._runtime).seed()

    def seed_all(self) -> None:
        """Seed the device's generator at random."""
        self.seed()

    def initial_seed(self) -> int:
        """Return the seed of the device's generator."""
        return known_generator(self._runtime).initial_seed()


def substitutions(runtime: DeviceRuntime, translate: DeviceTranslator) -> Iterator[Substitution]:
    """Replace the seed and state functions of ``torch.cuda`` and ``torch.cuda.random``, and ``torch.Generator``."""
    calls = RandomCalls(runtime)
    for name in (name for name, value in vars(RandomCalls).items() if callable(value) and name != "__init__"):
        call = getattr(calls, name)
        yield Substitution(torch.cuda, name, call)
        yield Substitution(torch.cuda.random, name, call)
    yield Substitution(torch.cuda, "default_generators", RuntimeGenerators(runtime))
    yield Substitution(torch, "Generator", _generator_class(translate))


def _generator_class(translate: DeviceTranslator) -> type:
    """Make a class that builds real generators on the translated device and recognises all of them."""
    original = torch.Generator

    class AnyGenerator(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=AnyGenerator):  # type: ignore[misc,valid-type]
        def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
            return original(device=translate(device))

    return Generator
