"""The endpoint of a run: programs talk to the model while it is trained (``rollout.endpoint``)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.config.generation import EndpointSection
from anytron.run.preflight.capabilities import generates_in_training
from anytron.serving.installation import check_installed
from anytron.serving.keys import KEY_VARIABLE, new_key, read_key, variable_key

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.serving.endpoint import Endpoint
    from anytron.serving.limits import Limits

MODEL = "policy"
"""Name of the model in requests."""


def endpoint_key(config: RunConfig) -> str | None:
    """Return the key of the run's endpoint; None if it has no endpoint.

    Without the section ``rollout.endpoint`` only agents of the run use the endpoint, and the key is new and secret.

    Raises:
        ConfigError: The section is set and there is no usable key, packages are missing, the address cannot be used, or
            the training ranks generate.
    """
    section, environment = config.rollout.endpoint, config.environment
    agent = environment is not None and environment.is_agent
    if section is None and not agent:
        return None
    where = "rollout.endpoint" if environment is None or not agent else environment.called[0]
    if generates_in_training(config):
        raise ConfigError(
            "An agent or an endpoint needs rollout processes.",
            where=where,
            why=f"rollout.engine={config.rollout.engine} generates on the training ranks, which cannot answer requests "
            "while they train",
            fix="set rollout.engine=transformers or vllm, or remove the agent (section environment) and "
            "rollout.endpoint",
        )
    check_installed(where)
    if section is None or section.key_file is not None:
        os.environ.pop(KEY_VARIABLE, None)  # processes of the run do not inherit it
    if section is None:
        return new_key()
    _bound(section).close()  # an address that cannot be used is found before prompts are read
    key = variable_key() if section.key_file is None else read_key(Path(section.key_file))
    if key is None:
        raise ConfigError(
            "The endpoint has no key.",
            where="rollout.endpoint",
            why=f"rollout.endpoint.key_file is not set, and the environment variable {KEY_VARIABLE} is not set",
            fix=f"choose a key: export {KEY_VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')",
        )
    return key


@contextlib.contextmanager
def open_endpoint(
    config: RunConfig, prepared: PreparedRun, key: str | None, tell: Callable[[str], None]
) -> Iterator[Endpoint | None]:
    """Start the endpoint of a run, and end it afterwards; yield None if the run has none.

    Args:
        config: The run's configuration.
        prepared: Tokenizer, sampling parameters and limits of the model.
        key: The key (:func:`endpoint_key`).
        tell: Called with a line about the endpoint.

    Raises:
        ConfigError: The address cannot be used.
    """
    if key is None:
        yield None
        return
    from anytron.serving.endpoint import Endpoint
    from anytron.serving.limits import Limits
    from anytron.serving.service import ServedModel

    bound = _bound(config.rollout.endpoint or EndpointSection())
    context = longest_context(config, prepared.context_length)
    known = prepared.tokenizer, prepared.vocab_size, context, prepared.sampling
    model = ServedModel(MODEL, *known, is_trained=True, vision=prepared.vision)
    agents = 0 if config.environment is None else config.environment.processes
    limits = limits_of(config, Limits(connections=512 + 4 * agents, requests=256 + 4 * agents))
    with Endpoint(model, prepared.chat_template_kwargs, key, bound, limits) as endpoint:
        endpoint.start()
        if config.rollout.endpoint is not None:
            tell(f"serving the model {MODEL} at {endpoint.url} while it is trained")
            if not endpoint.is_loopback:
                tell("warning: other machines can reach this address; keys, prompts and answers are sent unencrypted")
        yield endpoint


def limits_of(config: RunConfig, limits: Limits) -> Limits:
    """Return limits of a server with those of memory that the configuration sets."""
    section = config.rollout.endpoint_limits
    return replace(
        limits,
        body_bytes=section.request_mib << 20,
        session_bytes=section.session_mib << 20,
        memory_bytes=section.memory_mib << 20,
    )


def _bound(section: EndpointSection) -> socket.socket:
    from anytron.serving.server import bind

    return bind(section.host, section.port, ("rollout.endpoint.host=", "rollout.endpoint.port="))


def longest_context(config: RunConfig, model: int | None) -> int | None:
    """Return the most tokens of prompt and answer that the rollout engine takes; None = any number."""
    limits = [limit for limit in (model, config.rollout.options.get("max_model_len")) if isinstance(limit, int)]
    return min(limits, default=None)
