"""From the name of a checkpoint to sharded arrays: `hub`, `shape`, `files`, `generation` read small
files; `stored`, `matching`, `reading` tensors; `packed`, `adapter`, `converting`, `random_weights`
are for other forms. Imports the words of the model files. To start, read `checkpoint`."""
