"""A scope is fresh at each entry, known inside, and gone outside."""

import contextlib
import threading

from anytron.sequences import scopes


def recording(log, name):
    @contextlib.contextmanager
    def scope():
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    return scope


def test_combined_scopes_open_in_order_and_close_in_reverse():
    log = []
    with scopes.enter(scopes.combine(recording(log, "a"), None, recording(log, "b"))):
        log.append("body")
    assert log == ["enter a", "enter b", "body", "leave b", "leave a"]


def test_nothing_to_combine_is_no_scope():
    assert scopes.combine(None, None) is None


def test_the_parts_of_a_combined_scope_are_known():
    first, second, third = (recording([], name) for name in "abc")
    assert scopes.parts(scopes.combine(scopes.combine(first, second), third)) == (first, second, third)
    assert scopes.parts(first) == (first,)
    assert scopes.parts(None) == ()


def test_a_captured_factory_opens_again_on_another_thread():
    log = []
    captured = []
    with scopes.enter(recording(log, "first")):
        captured.append(scopes.current())
    assert scopes.current() is None

    def recompute():
        assert scopes.current() is None
        with scopes.enter(captured[0]):
            log.append(f"recompute knows its scope: {scopes.current() is captured[0]}")

    thread = threading.Thread(target=recompute)
    thread.start()
    thread.join()
    assert log == ["enter first", "leave first", "enter first", "recompute knows its scope: True", "leave first"]


def test_the_scope_ends_when_the_body_fails():
    log = []
    with contextlib.suppress(RuntimeError), scopes.enter(recording(log, "s")):
        raise RuntimeError
    assert log == ["enter s", "leave s"]
    assert scopes.current() is None


def test_a_rescoped_function_opens_a_scope_of_its_own_only_when_it_is_run_again():
    log = []

    def body():
        log.append("body")

    with scopes.enter(recording(log, "i")):
        again = scopes.rescoped(body)
        again()
    with scopes.enter(recording(log, "j")):
        again()
    assert log == ["enter i", "body", "leave i", "enter j", "enter i", "body", "leave i", "leave j"]


def test_without_a_scope_a_function_stays_what_it_is():
    def body():
        pass

    assert scopes.rescoped(body) is body
