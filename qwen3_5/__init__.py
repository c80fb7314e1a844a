"""Qwen3.5: see model.py."""
