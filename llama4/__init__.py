"""Llama 4: see model.py."""
