"""python -m qwen3_5.main --help"""

from common.command.cli import main

from . import model, mtp

if __name__ == "__main__":
    main(model, drafting=mtp)
