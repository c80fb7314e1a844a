"""python -m gpt_oss.main --help"""

from common.cli import main

if __name__ == "__main__":
    main("gpt_oss")
