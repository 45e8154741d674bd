"""Mixtures of experts: auxiliary losses weighted by tokens, and router replay."""
