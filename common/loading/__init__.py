"""From the name of a checkpoint to sharded arrays. `hub` finds the directory, or downloads a
repository. `shape` finds its config.json, or that of a published size, and `files` reads small
files. `stored` lists the tensors of safetensors files, `matching` decides which stored tensor
becomes which weight, and `reading` reads tensors and checks their numbers. `packed` knows what
quantised files hold, and `adapter` what a LoRA adapter adds. `converting` quantises matrices that
were loaded. `checkpoint` puts this together. `random_weights` makes weights without a checkpoint,
and `generation` reads how the authors of one sample.

Imports the words of the model files. To start, read `load_weights` in `checkpoint.py`.
"""
