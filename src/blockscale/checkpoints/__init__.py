"""Block-scaled weights on disk: checkpoints opened lazily, written, and converted from one layout to another.

files.py       safetensors folders: checked headers, lazy reads, shards
gguf.py        GGUF files, read only
layouts/       a file for each layout: names and dtypes of codes and scales
checkpoint.py  open, write
convert.py     convert: every weight kept, re-expressed exactly, or rounded on demand
"""

from .checkpoint import Checkpoint, open, write
from .convert import ConvertReport, convert
from .layouts import LAYOUTS

__all__ = ["LAYOUTS", "Checkpoint", "ConvertReport", "convert", "open", "write"]
