"""From training to text: a tiny model learns a song in MXFP8, is exported with the bytes of training, and sings.

The checkpoint holds codes and scales; the loaded model multiplies by them and never stores them decoded. The same
from the command line: `blockscale train`, `blockscale export`, `blockscale generate`.

    python examples/train_and_generate.py
"""

import tempfile
from pathlib import Path

import torch

import blockscale as bs
from blockscale.train import DataConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig, train
from blockscale.train.export import export_run

SONG = "Row, row, row your boat gently down the stream. "
PROMPT, STEPS, NEW = "Row, row, ", 48, 38


def main() -> dict[str, float]:
    """Share of the song's symbols that the loaded model sings right, and the number of its frozen layers."""
    with tempfile.TemporaryDirectory() as folder:
        text, run, checkpoint = (Path(folder) / name for name in ("song.txt", "run", "checkpoint"))
        text.write_text(SONG * 100)
        config = RunConfig(
            "song",
            ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, hidden=128),
            DataConfig(str(text), sequence=48, cache=Path(folder) / "cache"),
            OptimizerConfig(rate=1e-2),
            RecipeConfig("mxfp8", keep_first=0, keep_last=0),
            steps=STEPS,
            batch=8,
            eval_every=0,
            folder=run,
        )
        train(config)
        export_run(run, checkpoint)
        model, report = bs.inference.load(checkpoint, device="cpu")
    print(report)

    prompt = torch.tensor([list(PROMPT.encode())])
    sung = text_of(bs.inference.generate(model, prompt, NEW)[0])
    print(sung)
    for row in bs.inference.generate(model, prompt.expand(2, -1), NEW, temperature=0.5, seed=1):
        print(text_of(row))

    right = sum(a == b for a, b in zip(sung[len(PROMPT) :], SONG[len(PROMPT) :], strict=False)) / NEW
    return {"right": right, "frozen layers": float(len(report.converted))}


def text_of(symbols: torch.Tensor) -> str:
    """Bytes as text."""
    return bytes(symbols.tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
