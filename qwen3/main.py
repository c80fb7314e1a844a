"""python -m qwen3.main --help"""

from common.cli import main

if __name__ == "__main__":
    main("qwen3")
