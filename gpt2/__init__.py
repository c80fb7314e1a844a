"""GPT-2: see model.py."""
