"""Say for ``anytron doctor`` which Ray there is, whether its cluster runs, and which devices it has. Starts nothing."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.base.results import Result, of_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.results import Status
    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform

ADDRESS = "RAY_ADDRESS"
RUNNING = Path("ray", "ray_current_cluster")
"""Where ``ray start`` notes a cluster, below Ray's temporary directory (``ray/_private/utils.py``)."""
REACHED_S = 5.0
"""Seconds in which the head's machine must answer."""
KEPT = "RAY_EXPERIMENTAL_NOSET_"
"""Variables of this beginning tell Ray to leave the devices of its workers alone."""


def examine(config: RunConfig | None, platform: Platform) -> Iterator[Result]:
    """Look for a cluster.

    Args:
        config: A run on Ray; None = none in particular.
        platform: Says by which resource Ray counts the devices.
    """
    yield Result("executors.ray.version", "passed", version("ray"))
    counted = platform.ray_resource
    what = "processors" if counted is None else f"the resource {counted}"
    yield Result("executors.ray.devices", "passed", f"one training rank takes one of {what}")
    kept = sorted(name for name in os.environ if name.startswith(KEPT))
    if kept:
        detail = f"{', '.join(kept)}: Ray does not restrict which devices its workers see; ranks take those it assigns"
        yield Result("executors.ray.visibility", "passed", detail)
    named = os.environ.get(ADDRESS)
    place = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / RUNNING  # noqa: S108 - Ray's own default
    if not named and not place.is_file():
        detail = f"{ADDRESS} is not set and no cluster runs here: a run starts one of this machine alone"
        yield Result("executors.ray.cluster", "passed", detail)
        return
    yield from _cluster(named or place.read_text(encoding="utf-8").strip(), config, platform)


def _cluster(address: str, config: RunConfig | None, platform: Platform) -> Iterator[Result]:
    import ray

    from anytron_ray import cluster

    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself waits for a minute
            socket.create_connection((host, int(port)), REACHED_S).close()
        ray.init(address=address, log_to_driver=False)
    except Exception as error:  # noqa: BLE001 - Ray says in a dozen classes that it did not work
        fix = "`ray status` shows whether it runs; its Ray and its Python must be of this one's versions; or `ray stop`"
        status: Status = "warning" if config is None else "failed"
        yield Result("executors.ray.cluster", status, f"{address} cannot be joined: {error}", fix)
        return
    try:
        total = {name: count for name, count in ray.cluster_resources().items() if ":" not in name}
        nodes = sum(node["Alive"] for node in ray.nodes())
        has = ", ".join(f"{count:g} {name}" for name, count in sorted(total.items()) if "memory" not in name)
        yield Result("executors.ray.cluster", "passed", f"{address}: {nodes} machines, {has}")
        if config is not None:
            apart = config.rollout.replicas if config.rollout.placement == "separate" else 0
            cluster.require(config.parallel.world_size, apart, platform.ray_resource)
            yield Result("executors.ray.room", "passed", f"enough for {config.parallel.world_size + apart} processes")
    except ConfigError as error:
        yield of_error("executors.ray.room", error)
    finally:
        ray.shutdown()
