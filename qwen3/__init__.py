"""Qwen3: see model.py."""
