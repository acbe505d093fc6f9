"""Phloem: a structured-generation runtime for language models."""
