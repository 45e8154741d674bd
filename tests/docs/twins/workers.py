"""Twins of processes, and of the transfer of weights."""

from __future__ import annotations

from tests.docs.twins.twin import Twin

WORKERS = (
    Twin(
        "tests/core/run/trainer/test_weight_transfer.py::test_auto_shares_memory_on_one_machine_and_listens_at_no_more_addresses_than_it_must",
        "core/anytron/run/trainer/weight_transfer.py",
        "sender=LOOPBACK if reached else sender.address,",
        "sender=sender.address,",
    ),
    Twin(
        "tests/core/workers/executor/test_local.py::test_a_worker_is_built_in_order_and_told_who_it_is",
        "core/anytron/workers/executor/process.py",
        "sys.path[:] = filter(None, sys.path); ",
        "",
    ),
    Twin(
        "tests/core/workers/executor/test_local.py::test_collectives_work_and_listen_on_the_loopback_interface_alone",
        "core/anytron/workers/executor/base.py",
        "return {} if interface is None else dict.fromkeys(names, interface)",
        "return {}",
    ),
    Twin(
        "tests/core/workers/executor/test_local.py::test_nothing_of_ours_is_unpickled_before_the_engine_is_built",
        "core/anytron/workers/executor/worker.py",
        "    try:\n        with no_collections():  # it imports the engine\n",
        "    try:\n        decode(connection.recv_bytes())\n        with no_collections():\n",
    ),
    Twin(
        "tests/core/workers/weights/test_strangers.py::test_a_proof_has_one_deadline_however_slowly_its_bytes_come",
        "core/anytron/workers/weights/network.py",
        "time.monotonic() + PROOF_S)",
        "time.monotonic() + 1e6)",
    ),
    Twin(
        "tests/core/workers/weights/test_strangers.py::test_a_reader_does_not_take_weights_from_another_sender",
        "core/anytron/workers/weights/messages.py",
        "if not hmac.compare_digest(proof, _proof(secret, side, challenges)):",
        "if len(proof) != len(_proof(secret, side, challenges)):",
    ),
    Twin(
        "tests/core/workers/weights/test_strangers.py::test_a_reader_with_another_secret_is_refused_and_the_right_one_gets_its_weights",
        "core/anytron/workers/weights/messages.py",
        "if not hmac.compare_digest(proof, _proof(secret, side, challenges)):",
        "if len(proof) != len(_proof(secret, side, challenges)):",
    ),
    Twin(
        "tests/core/workers/weights/test_strangers.py::test_a_recorded_proof_proves_nothing_again",
        "core/anytron/workers/weights/messages.py",
        "self.text = secrets.token_bytes(_CHALLENGE_BYTES)",
        "self.text = bytes(_CHALLENGE_BYTES)",
    ),
    Twin(
        "tests/core/workers/weights/test_strangers.py::test_a_transfer_ends_in_time_while_strangers_knock",
        "core/anytron/workers/weights/stream.py",
        "connection = end.accept(LOOK_S)",
        "connection = end.accept(8.0)",
    ),
    Twin(
        "tests/core/workers/weights/test_strangers.py::test_strangers_that_say_nothing_hold_up_nobody",
        "core/anytron/workers/weights/network.py",
        "if len(self._callers) > CALLERS:",
        "if False:",
    ),
    Twin(
        "tests/core/workers/weights/test_stream.py::test_rank_0_and_the_driver_listen_where_they_are_told_and_only_while_it_is_needed",
        "core/anytron/workers/weights/network.py",
        "create_server((address, 0),",
        'create_server(("", 0),',
    ),
)
