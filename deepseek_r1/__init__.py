"""DeepSeek V3 and R1: see model.py."""
