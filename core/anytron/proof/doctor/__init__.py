"""``anytron doctor``: examine this machine, and a run on it, topic by topic, even if a topic fails."""
