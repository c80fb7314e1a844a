"""Llama 3: see model.py."""
