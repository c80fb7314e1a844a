"""python -m kimi_k2.main --help"""

from common.cli import main

from . import model

if __name__ == "__main__":
    main(model)
