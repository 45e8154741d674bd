"""Anytron: reinforcement-learning training of language models on Megatron-Core, on any accelerator.

A plugin author needs three names from here::

    from anytron import Platform, hookimpl

    class MyChip(Platform):          # entry point group ``anytron.platforms``
        name = "mychip"

        @hookimpl
        def attention_kernel(self, spec): ...

Importing this package imports nothing: ``python -m anytron`` does so while the current directory is still the first
place where Python looks for modules, those of the standard library included.
"""

TYPE_CHECKING = False  # the constant of typing, without importing it
if TYPE_CHECKING:
    from anytron.device.hooks.markers import hookimpl
    from anytron.device.platform import Platform

    __version__: str

__all__ = ["Platform", "__version__", "hookimpl"]


def __getattr__(name: str) -> object:
    """Import what is above when it is first asked for."""
    if name == "Platform":
        from anytron.device.platform import Platform

        return Platform
    if name == "hookimpl":
        from anytron.device.hooks.markers import hookimpl

        return hookimpl
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    """Give the version of the installed distribution: it names the commit from which it was installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("anytron")
    except PackageNotFoundError:  # its sources are on the path, and nobody has installed them
        return "0+not.installed"
