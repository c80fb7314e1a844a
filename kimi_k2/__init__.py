"""Kimi K2: see model.py."""
