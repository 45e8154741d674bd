"""The Ascend platform: Huawei NPUs."""

from anytron_ascend.platform import AscendPlatform

__all__ = ["AscendPlatform"]
