"""`blockscale generate`: text from a checkpoint, on any device."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, message, refuse
from . import arguments

# ends a file in training text of bytes (train/data.py)
_END_OF_BYTES = 0
_BYTES = 256


def run(
    folder: Path,
    /,
    prompt: str | None = None,
    tokens: tuple[int, ...] = (),
    new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    device: str | None = None,
) -> int:
    """Go on with a prompt. Models of 256 symbols read bytes, as blockscale train does by default; others need the
    tokenizer.json in their folder, or --tokens.

    Args:
        folder: Folder of a checkpoint, from blockscale export or in another layout that blockscale inspect knows.
        prompt: Text to go on with.
        tokens: Symbols to go on with, in place of --prompt; symbols are printed.
        new_tokens: Symbols to add at most; a separator of the training text ends it.
        temperature: 0 takes the most likely symbol, 1 draws from the model's distribution.
        top_k: Draw only from so many most likely symbols.
        seed: Seed of the draws.
        device: cpu, cuda or cuda:0; default: the first GPU if there is one.
    """
    if (prompt is None) == (not tokens):
        given = "neither --prompt nor --tokens" if prompt is None else "--prompt and --tokens"
        refuse(given, "exactly one of them is what the model goes on with", "pass --prompt 'def '")
    arguments.at_least(1, new_tokens, "--new-tokens", "symbols are added one by one")
    if not 0 <= temperature < float("inf"):
        refuse(f"--temperature {temperature}", "it is 0 or more", "pass --temperature 1, or leave it out")
    if top_k is not None:
        arguments.at_least(1, top_k, "--top-k", "a symbol is drawn from one or more")
    arguments.check_device(device)
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        import torch

        from ..hardware import default_device, named_device
        from ..inference import generate, load

    place = default_device() if device is None else named_device(device)
    with console.status("reading weights ..."):
        model, _ = load(folder, device=place)
    known = model.config.vocabulary
    end, decode = None, _numbers
    if prompt is not None:
        encode, decode, end = _text_symbols(folder, known)
        try:
            tokens = tuple(encode(prompt))
        except UnicodeEncodeError:
            refuse(f"--prompt {prompt!a}", "it is text in UTF-8", "pass --prompt 'def ', or --tokens 1,2,3")
        if not tokens:
            refuse(f"--prompt {shlex.quote(prompt)}", "a prompt has one symbol or more", "pass --prompt 'def '")
    if wrong := [each for each in tokens if not 0 <= each < known]:
        refuse(f"symbol {wrong[0]}", f"the model has symbols 0 to {known - 1}", "pass symbols of its tokenizer")
    # the last symbol is drawn and never read
    if (most := model.sequence + 1 - len(tokens)) < new_tokens:
        what, rule = f"--new-tokens {new_tokens} after {len(tokens)}", f"the model has {model.sequence} positions"
        refuse(what, rule, f"pass --new-tokens {most} or less" if most > 0 else "pass a shorter prompt")
    given = torch.tensor([tokens], device=place)
    with console.status("generating ..."):
        found = generate(model, given, new_tokens, temperature=temperature, top_k=top_k, seed=seed, end=end)
    symbols: list[int] = found[0].tolist()
    if end in (added := symbols[len(tokens) :]):
        symbols = symbols[: len(tokens) + added.index(end)]
    encoding = sys.stdout.encoding or "utf-8"
    print(_printable(decode(symbols)).encode(encoding, errors="replace").decode(encoding))
    return 0


def _numbers(symbols: Sequence[int]) -> str:
    return ",".join(map(str, symbols))


def _text_symbols(
    folder: Path, vocabulary: int
) -> tuple[Callable[[str], Sequence[int]], Callable[[Sequence[int]], str], int | None]:
    """Functions from text to symbols and back, and the symbol that ends a text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if vocabulary == _BYTES:
            # bytes of an argument that are no text come as surrogates
            return os.fsencode, lambda symbols: bytes(symbols).decode(errors="replace"), _END_OF_BYTES
        what, rule = f"--prompt for a model of {vocabulary:,} symbols", "text becomes symbols by its tokenizer"
        refuse(what, rule, f"copy its tokenizer.json to {folder}, or pass --tokens 1,2,3", error=DataError)
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        rule, fix = (
            "a tokenizer.json is read by Hugging Face's package",
            "pip install tokenizers, or pass --tokens 1,2,3",
        )
        raise DataError(message(f"{path} without the package tokenizers", rule=rule, fix=fix)) from None
    from ..train.data import SEPARATORS

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:
        rule = "it is a tokenizer.json as Hugging Face writes it"
        raise DataError(message(f"{path}: {error}", rule=rule, fix="restore it, or pass --tokens 1,2,3")) from None
    # lengths of training are not those of a prompt
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = [each for name in SEPARATORS if (each := tokenizer.token_to_id(name)) is not None]

    def encode(text: str) -> list[int]:
        text.encode()  # raises for surrogates, which have no symbols
        symbols: list[int] = tokenizer.encode(text).ids
        while symbols and symbols[-1] in ends:  # appended by a template
            symbols.pop()
        return symbols

    return (
        encode,
        lambda symbols: tokenizer.decode(list(symbols)),
        next(iter(ends), None),
    )


def _printable(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
