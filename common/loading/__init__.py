"""From the name of a checkpoint to sharded arrays: the directory or hub repository (`hub`), its
config.json or that of a published size (`shape`), its small files (`files`), the headers of its
safetensors files (`stored`), which stored tensor becomes which weight (`matching`), the reading
itself (`reading`, `finite`), and the whole of it (`checkpoint`). `random_weights` makes weights
where there is no checkpoint.

Imports the words of the model files. To start, read `load_weights` in `checkpoint.py`.
"""
