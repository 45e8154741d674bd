"""The training engine ``mindspeed_llm``: MindSpeed-LLM's models, trained by Anytron's loop."""
