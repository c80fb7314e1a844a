"""GPT-OSS: see model.py."""
