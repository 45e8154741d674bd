"""The rollout engine that generates with vLLM."""
