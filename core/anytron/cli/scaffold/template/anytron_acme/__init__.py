"""The Acme platform of Anytron. Importing it must work on every machine, with or without the device."""

from anytron_acme.platform import AcmePlatform

__all__ = ["AcmePlatform"]
