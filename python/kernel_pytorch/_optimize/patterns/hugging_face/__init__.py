"""Patterns of Hugging Face's own switches and layouts."""
