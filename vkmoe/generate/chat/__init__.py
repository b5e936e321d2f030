"""This package writes a conversation as the prompt that the model's chat template makes of it."""
