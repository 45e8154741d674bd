"""``anytron doctor``: examine this machine, and a run on it, topic by topic. A topic that fails stops no other."""
