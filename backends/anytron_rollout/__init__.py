"""The rollout engine that generates with Hugging Face transformers."""
