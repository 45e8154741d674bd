"""An OpenAI-compatible server over rollout engines, and the conversations that it records as token ids."""
