"""Models: from a Hugging Face directory to Megatron modules and back."""
