"""The few PTX instructions of inline assembly in kernels, on tensors: one value per element, 32 bits in int64."""

from __future__ import annotations

import re

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def run_ptx(assembly: str, outputs: int, *inputs: Tensor) -> list[Tensor]:
    """Registers $0 to $(outputs - 1) after the instructions; the inputs are the registers after those."""
    registers: dict[str, Tensor] = {f"${outputs + i}": each.long() & WORD for i, each in enumerate(inputs)}

    def read(operand: str) -> Tensor:
        if operand.startswith("{"):
            low, high = (registers[name.strip()] for name in operand[1:-1].split(","))
            return low | high << 16
        return torch.tensor(int(operand, 0)) if operand[0].isdigit() else registers[operand]

    for line in assembly.strip().strip("{}").replace("\n", " ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(" ", 1)
        target, *operands = (each.strip() for each in re.findall(r"\{[^}]*\}|[^,\s]+", rest))
        value = _run(name, [read(each) for each in operands])
        if target.startswith("{"):
            for place, part in enumerate(target[1:-1].split(",")):
                registers[part.strip()] = value >> 16 * place & 0xFFFF
        else:
            registers[target] = value & WORD
    return [registers[f"${i}"] for i in range(outputs)]


def _run(name: str, values: list[Tensor]) -> Tensor:
    match name:
        case "and.b32":
            return values[0] & values[1]
        case "shl.b32":
            return values[0] << values[1]
        case "shr.b32":
            return values[0] >> values[1]
        case "shf.r.wrap.b32":  # of the pair (second, first), by the third
            return (values[1] << 32 | values[0]) >> values[2] if _fits(values) else torch.tensor(0)
        case "lop3.b32":
            return _lop3(*values)
        case "mov.b32":
            return values[0]
        case "mul.rn.bf16x2":
            return _multiply(*values)
    raise AssertionError(f"no {name} here")


def _fits(values: list[Tensor]) -> bool:
    assert 0 < int(values[2]) < 32
    return True


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Any function of three bits, by its truth table."""
    result = torch.zeros_like(a)
    for index in range(8):
        if int(table) >> index & 1:
            bits = [each if index >> place & 1 else ~each for each, place in ((a, 2), (b, 1), (c, 0))]
            result = result | (bits[0] & bits[1] & bits[2])
    return result & WORD


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Pairs of bf16: exact products in fp64, rounded once to nearest even, subnormals kept."""
    a, b = torch.broadcast_tensors(a, b)
    result = torch.zeros_like(a)
    for place in (0, 16):
        factors = [_as_double(each >> place & 0xFFFF) for each in (a, b)]
        result = result | _as_bf16(factors[0] * factors[1]) << place
    return result


def _as_double(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).double()


def _as_bf16(x: Tensor) -> Tensor:
    # by way of fp32, which must be exact: two roundings are not one
    single = x.float()
    assert torch.equal(single.double(), x), "not exact in fp32"
    return single.bfloat16().view(torch.int16).long() & 0xFFFF
