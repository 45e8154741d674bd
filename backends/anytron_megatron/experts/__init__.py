"""Mixtures of experts: auxiliary losses weighed by tokens, and router replay."""
