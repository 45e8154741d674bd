"""Twins of the server of ``anytron serve``."""

from __future__ import annotations

from tests.docs.twins.twin import Twin

SERVING = (
    Twin(
        "tests/core/serving/test_attacks.py::test_without_the_key_nothing_is_answered",
        "core/anytron/serving/keys.py",
        "        if session is None:\n            raise Refusal(401",
        "        if session is None and authorization is None:\n            raise Refusal(401",
    ),
    Twin(
        "tests/core/serving/test_attacks.py::test_a_key_of_a_session_sees_no_other_session",
        "core/anytron/serving/keys.py",
        "        if found is None or (session is not None and session is not found):",
        "        if found is None:",
    ),
    Twin(
        "tests/core/serving/test_attacks.py::test_a_body_that_is_too_large_is_refused",
        "core/anytron/serving/app.py",
        "            if size > self._limits.body_bytes:",
        "            if size < 0:",
    ),
    Twin(
        "tests/core/serving/test_attacks.py::test_slow_headers_and_slow_bodies_end",
        "core/anytron/serving/server.py",
        "self.loop.call_later(self._limits.headers_s, self._late)",
        "self.loop.call_later(3600.0, self._late)",
    ),
    Twin(
        "tests/core/serving/test_attacks.py::test_connections_that_send_nothing_keep_nobody_out",
        "core/anytron/serving/server.py",
        "        if len(self._others) > self._limits.connections:",
        "        if len(self._others) < 0:",
    ),
    Twin(
        "tests/core/serving/test_attacks.py::test_too_many_requests_and_sessions_are_refused",
        "core/anytron/serving/app.py",
        "        if self._busy >= self._limits.requests:",
        "        if self._busy < 0:",
    ),
    Twin(
        "tests/core/run/rollout/test_agents.py::test_a_key_ends_with_its_agent",
        "core/anytron/serving/endpoint.py",
        "        self._server.call(lambda: self._keys.delete(session))",
        "        self._server.call(lambda: None)",
    ),
    Twin(
        "tests/core/cli/test_serve_command.py::test_a_key_that_others_can_read_is_refused",
        "core/anytron/serving/keys.py",
        "    if mode & (stat.S_IRWXG | stat.S_IRWXO):",
        "    if mode < 0:",
    ),
    Twin(
        "tests/core/serving/test_images.py::test_nothing_is_fetched",
        "core/anytron/serving/pictures.py",
        "    if not DATA_URL.match(url):",
        "    if not url:",
    ),
    Twin(
        "tests/core/serving/test_images.py::test_too_many_pixels_are_refused_before_they_are_decoded",
        "core/anytron/serving/rendering.py",
        "for picture in pictures)) > pixels:",
        "for picture in pictures)) < 0:",
    ),
    Twin(
        "tests/core/serving/test_memory.py::test_the_client_of_a_session_cannot_fill_the_server",
        "core/anytron/serving/memory.py",
        "            if session.recorded + own + size > most:",
        "            if size < -own:",
    ),
    Twin(
        "tests/core/serving/test_memory.py::test_requests_of_a_session_that_wait_cannot_fill_the_server",
        "core/anytron/serving/memory.py",
        "            if session.recorded + session.in_progress + size > most:",
        "            if size < -own:",
    ),
    Twin(
        "tests/core/serving/test_memory.py::test_all_sessions_together_cannot_fill_the_server",
        "core/anytron/serving/memory.py",
        "        if self.held + self._recorded() + size > most:",
        "        if size < -own:",
    ),
    Twin(
        "tests/core/serving/test_memory.py::test_the_objects_of_a_body_take_no_more_than_is_counted",
        "core/anytron/serving/memory.py",
        "    return NODE * sum(",
        "    return 0 * sum(",
    ),
    Twin(
        "tests/core/serving/test_memory.py::test_a_session_takes_no_more_than_is_counted",
        "core/anytron/serving/sessions.py",
        "    return TURN + 4 * given",
        "    return 4 * given",
    ),
)
