"""Write checkpoints for other packages to read: PYTHONPATH=src:tests python write_checkpoints.py OUT_FOLDER

Every golden checkpoint in every layout that holds it, and a small Llama that this library quantizes. Beside each lies
`expected.safetensors`, its values in the order of operations of the package. Needs this library's environment; then
check_checkpoints.py, in the environment of the other packages, decodes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import blockscale as bs
from blockscale import checkpoints
from blockscale.errors import BlockscaleError
from blockscale.formats import BlockScaled
from support.checkpoints import decoded

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
TARGETS = ("compressed_tensors", "modelopt", "deepseek", "gpt_oss")
FORMATS = {
    "compressed_tensors": ("fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4"),
    "modelopt": ("mxfp8_e4m3", "nvfp4"),
    "deepseek": ("fp8_128x128", "mxfp8_e4m3"),
}


# why Transformers does not load a folder as a whole model
ONLY_TENSORS = {
    "compressed_tensors_fp8_block as deepseek": "Transformers takes the tiles of 160 columns for two of 80",
    "gpt_oss as": "Transformers' gpt-oss has its experts in one tensor",
    "llama fp8_128x128 as compressed_tensors": "Transformers loads scales in the dtype of the model",
}


def expect(folder: Path) -> None:
    """Write the values of a checkpoint's quantized weights beside it."""
    found = checkpoints.open(folder)
    blocks = any(entry.format == "fp8_128x128" for entry in found.entries.values())
    values = {name: decoded(found, name) for name, entry in found.entries.items() if entry.format is not None}
    save_file({name: each.contiguous() for name, each in values.items()}, folder / "expected.safetensors")
    about = {"expected": {"exact": not (blocks and found.layout == "compressed_tensors")}}
    why = [
        text
        for start, text in ONLY_TENSORS.items()
        if folder.name.startswith(start) and not folder.name.endswith("gpt_oss")
    ]
    (folder / "made_by.json").write_text(json.dumps(about | ({"only_tensors": why[0]} if why else {})))


def main(out: Path) -> None:
    """Write all folders."""
    for case in sorted(GOLDEN.iterdir()):
        for target in TARGETS:
            folder = out / f"{case.name} as {target}"
            source = next(case.glob("*.gguf"), case)
            try:
                report = checkpoints.convert(source, folder, target)
            except BlockscaleError as error:
                print(f"{folder.name}: {error}")
                continue
            print(report)
            for path in ("expected.safetensors", "made_by.json"):
                (folder / path).unlink(missing_ok=True)
            expect(folder)
    llama = GOLDEN / "compressed_tensors_mxfp8"
    whole = checkpoints.open(llama)
    for layout, formats in FORMATS.items():
        for format in formats:
            folder = out / f"llama {format} as {layout}"
            values = {
                name: bs.dequantize(value, dtype=torch.float32) if isinstance(value, BlockScaled) else value
                for name, value in whole.items()
            }
            weights = {
                name: bs.quantize(value, format) if isinstance(whole[name], BlockScaled) else value
                for name, value in values.items()
            }
            config = {name: value for name, value in whole.config.items() if name != "quantization_config"}
            try:
                checkpoints.write(folder, weights.items(), layout, config=config)
            except BlockscaleError as error:
                print(f"{folder.name}: {error}")
                continue
            expect(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
