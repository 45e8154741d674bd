"""What an interleaved pipeline frees at once arrives all the same, in both directions."""


def test_a_late_receiver_gets_what_was_sent(run_program, tmp_path):
    facts = run_program("pipeline_sends.py", world=2, tmp_path=tmp_path)
    assert facts["unpatched"] == {"next": False, "prev": False}
    assert facts["patched"] == {"next": True, "prev": True}
    assert facts["outcome"] == ["applied"]
