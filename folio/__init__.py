"""Commands for a checkpoint of any family: `python -m folio`, `python -m folio.compare`."""
