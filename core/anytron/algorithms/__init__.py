"""Advantages, policy losses and KL estimators: pure functions of tensors, one subject per file."""
