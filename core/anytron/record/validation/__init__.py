"""What a policy's responses to prompts of their own say of it: estimates, their intervals, and which were best."""
