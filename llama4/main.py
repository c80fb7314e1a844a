"""python -m llama4.main --help"""

from common.cli import main

from . import model

if __name__ == "__main__":
    main(model)
