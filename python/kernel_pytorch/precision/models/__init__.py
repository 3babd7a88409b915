"""Whole models in few bits: converting them, their files, and Hugging Face's interface."""
