"""python -m gpt2.main --help"""

from common.cli import main

if __name__ == "__main__":
    main("gpt2")
