"""The oracles against the golden vectors, against each other, and against the libraries they are built on."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

import oracles

GOLDEN = Path(__file__).parent / "golden"
ELEMENT_OF = {
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp8_e4m3_128x128": "e4m3",
    "mxfp6_e2m3": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp4": "e2m1",
}


# ---- golden vectors ------------------------------------------------------------------------------------------------


def expand(tokens: list[str]) -> list[int]:
    """Hexadecimal entries as integers; `H*n` stands for n copies."""
    out: list[int] = []
    for token in tokens:
        digits, _, count = token.partition("*")
        out += [int(digits, 16)] * int(count or 1)
    return out


def f32(tokens: list[str]) -> np.ndarray:
    return np.array(expand(tokens), np.uint32).view(np.float32)


def u8(tokens: list[str]) -> np.ndarray:
    return np.array(expand(tokens), np.uint8)


def texts(values: np.ndarray | np.generic) -> list[str]:
    """Bit patterns in the notation of the golden files, without run lengths."""
    values = np.atleast_1d(values)
    width = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"u{width}").reshape(-1)
    return [f"{int(v):0{2 * width}X}" for v in bits]


def plain(tokens: str | list[str]) -> list[str]:
    """A golden scalar or list, run lengths expanded, in the notation of `texts`."""
    tokens = [tokens] if isinstance(tokens, str) else tokens
    return [t.partition("*")[0] for t in tokens for _ in range(int(t.partition("*")[2] or 1))]


def cases() -> list:
    found = []
    for path in sorted(GOLDEN.glob("*.json")):
        for case in json.loads(path.read_text())["cases"]:
            key = "-".join(str(case[k]) for k in ("op", "format", "rule", "name") if k in case)
            found.append(pytest.param(case, id=f"{path.stem}: {key}"))
    return found


def padded(values: np.ndarray, n: int) -> np.ndarray:
    assert len(values) <= n
    return np.concatenate((values, np.zeros(n - len(values), values.dtype)))


def mx_tile(case: dict) -> tuple[int, int]:
    """The block of a case: without a shape it is all there is."""
    if "shape" not in case:
        return 1, case["block"]
    return (128, 128) if case["format"].endswith("128x128") else (1, 32)


def run_quantize(case: dict) -> dict[str, list[str]]:
    fmt, rule, x = case["format"], case["rule"], f32(case["x"])
    if fmt.startswith("nvfp4"):
        tile = (16, 16) if fmt.endswith("16x16") else (1, 16)
        x = padded(x, int(np.prod(case["shape"]))).reshape(case["shape"])
        amax_t = f32([case["amax_t"]])[0] if "amax_t" in case else None
        s = oracles.nvfp4_scales(oracles.block_amax(oracles.to_blocks(x, tile)), amax_t, rule)
        S_dec, s_b, codes = oracles.nvfp4_quantize(x, amax_t, rule, tile)
        got = {name: texts(value) for name, value in s._asdict().items()}
        got |= {"tensor_scale": texts(S_dec), "scale": texts(s_b), "packed": texts(oracles.pack_fp4(codes))}
    elif fmt.startswith("fp8"):
        x = padded(x, case["block"])
        scale, codes = oracles.fp8_quantize(x, rule)
        enc, dec = oracles.fp8_scales(oracles.block_amax(x), rule)
        assert texts(dec) == texts(scale)
        got = {"scale": texts(scale), "enc": texts(enc), "scale_byte": [f"{int(scale.view(np.uint32)) >> 23:02X}"]}
    else:
        element, shape, tile = ELEMENT_OF[fmt], case.get("shape", [1, case.get("block")]), mx_tile(case)
        blocks = oracles.to_blocks(padded(x, int(np.prod(shape))).reshape(shape), tile)
        scale, codes = oracles.mx_quantize(blocks, element, rule, case.get("satfinite", False))
        codes = oracles.from_blocks(codes, tile, shape)
        got = {"scale": texts(scale)}
        if fmt.startswith(("mxfp6", "mxfp4")):
            packed = texts((oracles.pack_fp6 if fmt.startswith("mxfp6") else oracles.pack_fp4)(codes))
            got["packed"] = packed[: len(case["expect"].get("packed", packed))]
    return got | {"codes": texts(codes), "all_codes": sorted(set(texts(codes)))}


def run_dequantize(case: dict) -> dict[str, list[str]]:
    fmt, codes = case["format"], u8(case["codes"])
    if fmt.startswith("nvfp4"):
        tile = (16, 16) if fmt.endswith("16x16") else (1, 16)
        rows, cols = case["shape"]
        s_b = u8(case["scale"]).reshape(-(-rows // tile[0]), -(-cols // tile[1]))
        S_dec = f32([case["tensor_scale"]])[0]
        values = oracles.nvfp4_dequantize(S_dec, s_b, codes.reshape(rows, cols), tile)
    elif fmt.startswith("fp8"):
        values = oracles.fp8_dequantize(f32([case["scale"]])[0], codes)
    elif "shape" in case:
        (rows, cols), tile = case["shape"], mx_tile(case)
        byte = u8(case["scale"]).reshape(-(-rows // tile[0]), -(-cols // tile[1]))
        blocks = oracles.to_blocks(codes.reshape(rows, cols), tile)
        values = oracles.from_blocks(oracles.mx_dequantize(byte, blocks, ELEMENT_OF[fmt]), tile, (rows, cols))
    else:
        values = oracles.mx_dequantize(int(case["scale"], 16), codes, ELEMENT_OF[fmt])
    return {"values": texts(values), "bf16": texts(oracles.to_bf16(values))}


def run(case: dict) -> dict[str, list]:
    """Perform the operation of a golden case with the oracles."""
    op = case["op"]
    if op == "quantize":
        return run_quantize(case)
    if op == "dequantize":
        return run_dequantize(case)
    if op == "encode":
        return {"codes": texts(oracles.encode(f32(case["x"]), case["format"]))}
    if op == "decode":
        codes = u8(case["codes"])
        values = oracles.e8m0_decode(codes) if case["format"] == "e8m0" else oracles.decode(codes, case["format"])
        return {"values": texts(values)}
    if op == "philox":
        return {"words": texts(oracles.philox4x32(expand(case["counter"]), expand(case["key"])))}
    if op == "stream":
        crc = zlib.crc32(oracles.plain_module_name(case["module"]).encode())
        return {"crc32": [f"{crc:08X}"], "stream": [f"{oracles.stream_id(case['module'], case['role']):08X}"]}
    if op == "sr_bits":
        seed, stream = int(case["seed"], 16), int(case["stream"], 16)
        return {"words": texts(oracles.sr_bits(case["i"], seed, case["tick"], stream, case["group"]))}
    if op == "encode_sr":
        return {"codes": texts(oracles.encode_sr(f32(case["x"]), case["format"], expand(case["R"])))}
    if op == "hadamard":
        return {"bf16": texts(oracles.to_bf16(oracles.hadamard(f32(case["x"]), int(case["mask"], 16), case["group"])))}
    if op == "pack":
        return {"packed": texts({"fp4": oracles.pack_fp4, "fp6": oracles.pack_fp6}[case["format"]](u8(case["codes"])))}
    if op == "offset":
        r, c = np.array(case["positions"]).T
        if case["format"] == "swizzle_32_4_4":
            return {"offsets": [f"{v:X}" for v in oracles.blocked_offset(r, c, case["columns"])]}
        buffer = oracles.mn_major(np.zeros((case["rows"], case["columns"])))
        offsets = [f"{v:X}" for v in oracles.mn_major_index(r, c, case["rows"])]
        return {"offsets": offsets, "shape": list(buffer.shape)}
    raise AssertionError(f"unknown op {op}")


@pytest.mark.parametrize("case", cases())
def test_golden(case: dict) -> None:
    got = run(case)
    assert case["expect"]
    for key, want in case["expect"].items():
        if key == "shape":
            assert got[key] == want
            continue
        want = plain(want)
        if key == "codes" and case["op"] == "quantize":
            want += ["00"] * (len(got["codes"]) - len(want))
        assert got[key] == want, key


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_schema(path: Path) -> None:
    data = json.loads(path.read_text())
    assert set(data) == {"what", "cases"}
    keys = [tuple(case.get(k) for k in ("op", "format", "rule", "name")) for case in data["cases"]]
    assert len(set(keys)) == len(keys)
    assert all({"name", "from", "op", "expect"} <= set(case) for case in data["cases"])


# ---- scales and blocks against the third-party oracles ---------------------------------------------------------------


@pytest.mark.parametrize("rule", oracles.MX_RULES)
@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_mx_blocks_equal_gfloat(element: str, rule: str) -> None:
    pytest.importorskip("gfloat")
    groups = oracles.edge_blocks(element)
    edge = [group[:: max(1, len(group) // 60)] for group in groups.values()]
    x = np.concatenate([*edge, oracles.random_blocks(60, seed=1), oracles.random_blocks(60, seed=2, bf16=True)])
    scale, codes = oracles.mx_quantize(x, element, rule)
    for row, byte, row_codes in zip(x, scale, codes, strict=True):
        want_byte, want_codes = oracles.gfloat_mx_block(row, element, rule)
        assert byte == want_byte, row
        np.testing.assert_array_equal(row_codes, want_codes)


@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil"])
@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_mx_scale_equals_onnx(element: str, rule: str) -> None:
    pytest.importorskip("onnx")
    rng = np.random.default_rng(3)
    edge = np.concatenate([oracles.block_amax(group) for group in oracles.edge_blocks(element).values()])
    words = rng.integers(0, 1 << 31, 200_000, dtype=np.uint32).view(np.float32)
    amax = np.abs(np.concatenate((edge, words, oracles.all_bf16())))
    got, want = oracles.mx_scale(amax, element, rule), oracles.onnx_mx_scale(amax, element, rule)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_rceil_is_the_smallest_scale_that_does_not_clip(element: str) -> None:
    """On all 2^23 mantissas of one binade."""
    amax = np.arange(127 << 23, 128 << 23, dtype=np.uint32).view(np.float32)
    scale = oracles.e8m0_decode(oracles.mx_scale(amax, element, "rceil"))
    largest = oracles.spec(element).max
    assert (amax <= scale.astype(np.float64) * largest).all()
    assert (amax > scale.astype(np.float64) / 2 * largest).all()


@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_ordinary_rounding_equals_gfloat(element: str) -> None:
    gfloat, formats = pytest.importorskip("gfloat"), pytest.importorskip("gfloat.formats")
    info = getattr(formats, f"format_info_ocp_{element}")
    values = oracles.edge_values(element)
    codes = oracles.encode(values, element)
    nan = np.isnan(values)
    assert (codes[nan] == oracles.spec(element).nan_code).all()
    for value, code in zip(values[~nan], codes[~nan], strict=True):
        rounded = gfloat.round_float(info, float(value), gfloat.RoundMode.TiesToEven, True)
        assert gfloat.encode_float(info, rounded) == code, value


@pytest.mark.parametrize("rule", ["floor", "even"])
@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_requantising_returns_the_same_bytes(element: str, rule: str) -> None:
    x = np.concatenate([oracles.random_blocks(2000), *oracles.edge_blocks(element).values()])
    scale, codes = oracles.mx_quantize(x, element, rule)
    back = oracles.mx_dequantize(scale, codes, element)
    finite = np.isfinite(back).all(axis=-1)
    again = oracles.mx_quantize(back[finite], element, rule)
    np.testing.assert_array_equal(again[0], scale[finite])
    np.testing.assert_array_equal(again[1], codes[finite])


@pytest.mark.parametrize("rule", ["rceil", "ceil"])
@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_requantising_returns_the_same_values(element: str, rule: str) -> None:
    x = np.concatenate([oracles.random_blocks(2000), *oracles.edge_blocks(element).values()])
    back = oracles.mx_dequantize(*oracles.mx_quantize(x, element, rule), element)
    back = back[np.isfinite(back).all(axis=-1)]
    again = oracles.mx_dequantize(*oracles.mx_quantize(back, element, rule), element)
    np.testing.assert_array_equal(again.view(np.uint32), back.view(np.uint32))


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
def test_fp8_scales_are_normal_and_nothing_clips(rule: str) -> None:
    for x in oracles.fp8_edge_blocks().values():
        scale, codes = oracles.fp8_quantize(x, rule)
        finite = np.isfinite(oracles.block_amax(x))
        np.testing.assert_array_equal(np.isfinite(scale), finite)
        assert (scale[finite] >= np.finfo(np.float32).tiny).all()
        assert (codes[~finite] == 0x7F).all()
        x, scale, codes = x[finite], scale[finite], codes[finite]
        error = np.abs(oracles.fp8_dequantize(scale, codes).astype(np.float64) - x)
        # FLT_MAX under pow2 decodes to 2^128 = Inf; elsewhere half a step of E4M3 and the rounding of an fp32 scale.
        bound = np.maximum(np.abs(x).astype(np.float64) * 2.0**-3.99, scale[:, None] * 2.0**-9.99)
        assert ((error <= bound) | (np.abs(x) > 2.0**127)).all()


def test_nvfp4_edge_tensors() -> None:
    for name, (x, amax_t) in oracles.nvfp4_edge_tensors().items():
        for tile in ((1, 16), (16, 16)):
            for rule in ("nearest", "up"):
                S_dec, s_b, codes = oracles.nvfp4_quantize(x, amax_t, rule, tile)
                values = oracles.nvfp4_dequantize(S_dec, s_b, codes, tile)
                amax_b = oracles.block_amax(oracles.to_blocks(x, tile))
                assert codes.shape == x.shape
                assert codes.max() < 16
                assert s_b.shape == amax_b.shape
                if np.isfinite(amax_b.max() if amax_t is None else amax_t):
                    assert S_dec >= np.finfo(np.float32).tiny, name
                    np.testing.assert_array_equal(s_b == 0x7F, ~np.isfinite(amax_b), name)
                    if rule == "up":
                        assert ((s_b != 0) == (amax_b != 0)).all(), name
                else:
                    assert S_dec.view(np.uint32) == 0x7FC00000, name
                    assert (s_b == 0x7F).all(), name
                    assert (codes == 7).all(), name
                    assert np.isnan(values).all(), name


def test_nvfp4_tiles_commute_with_the_transpose_and_rows_do_not() -> None:
    w = oracles.random_blocks(40, 40)[::4]
    w = np.concatenate((w, w[::-1] * np.float32(3)))
    for tile, equal in (((16, 16), True), ((1, 16), False)):
        S_dec, s_b, codes = oracles.nvfp4_quantize(w, tile=tile)
        turned = oracles.nvfp4_quantize(w.T, tile=tile)
        back = oracles.nvfp4_dequantize(S_dec, s_b, codes, tile)
        assert np.array_equal(oracles.nvfp4_dequantize(*turned, tile), back.T) is equal


# ---- stochastic rounding, Hadamard, layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_stochastic_rounding_equals_gfloat(element: str) -> None:
    pytest.importorskip("gfloat")
    rng = np.random.default_rng(4)
    ordinary = (rng.standard_normal(2000) * oracles.spec(element).max / 3).astype(np.float32)
    small = (rng.standard_normal(1000) * oracles.spec(element).min_subnormal).astype(np.float32)
    v = np.concatenate((ordinary, small, oracles.edge_values(element)))
    R = rng.integers(0, 1 << 32, v.size, dtype=np.uint32)
    R[::5], R[1::5] = 0, 0xFFFFFFFF
    np.testing.assert_array_equal(oracles.encode_sr(v, element, R), oracles.gfloat_encode_sr(v, element, R))


@pytest.mark.parametrize("element", oracles.ELEMENTS)
def test_stochastic_rounding_is_unbiased(element: str) -> None:
    n = 1 << 18
    R = oracles.sr_bits(np.arange(n), seed=7)
    for value in (0.3, -2.75, oracles.spec(element).min_subnormal * 0.1, oracles.spec(element).max * 0.99):
        v = np.float32(value)
        drawn = oracles.decode(oracles.encode_sr(np.full(n, v), element, R), element).astype(np.float64)
        assert abs(drawn.mean() - v) <= 4 * drawn.std() / n**0.5 + 1e-30
        assert len(np.unique(drawn)) <= 2


def test_sr_bits_use_every_field_of_the_counter() -> None:
    base = {"seed": 1, "tick": 2, "stream": 3, "group": 4}
    i = np.arange(64)
    bits = oracles.sr_bits(i, **base)
    for change in ({"seed": 1 | 1 << 40}, {"tick": 3}, {"stream": 4}, {"group": 5}, {"group": 0}):
        assert (oracles.sr_bits(i, **base | change) != bits).mean() > 0.9
    assert (oracles.sr_bits(i.astype(np.uint64) + np.uint64(1 << 34), **base) != bits).mean() > 0.9
    np.testing.assert_array_equal(oracles.sr_bits(i.reshape(8, 8)[3:5, 2:7], **base), bits.reshape(8, 8)[3:5, 2:7])


@pytest.mark.parametrize("h", [16, 32])
def test_hadamard_equals_the_matrix_in_float64(h: int) -> None:
    """The butterfly is allowed one more fp32 rounding per stage than the exact product, no more than a bf16 ulp."""
    mask = oracles.HADAMARD_MASKS[h]
    i, j = np.indices((h, h))
    signs = np.where(np.array([mask >> k & 1 for k in range(h)]), -1.0, 1.0)
    matrix = np.where(np.bitwise_count(i & j) % 2, -1.0, 1.0) * signs[:, None] / h**0.5
    x = oracles.random_blocks(400, h * 2, seed=5)[0::4]
    want = (x.reshape(-1, 2, h).astype(np.float64) @ matrix).reshape(x.shape)
    got = oracles.hadamard(x, mask, h)
    assert np.abs(got - want).max() <= np.abs(want).max() * 2.0**-8
    same = got == want.astype(np.float32).astype(oracles.third_party("ml_dtypes").bfloat16).astype(np.float32)
    assert same.mean() > 0.999
    np.testing.assert_array_equal(oracles.hadamard(x[:, : h + 3], mask, h)[:, :h], got[:, :h])


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 3), (128, 4), (129, 5), (300, 9)])
def test_swizzle_equals_its_reshape_form(rows: int, cols: int) -> None:
    """The layout once more, as the transpose the cuBLAS documentation draws."""
    scales = np.random.default_rng(6).integers(1, 256, (rows, cols), dtype=np.uint8)
    full = np.pad(scales, ((0, -rows % 128), (0, -cols % 4)))
    tiles = full.reshape(full.shape[0] // 128, 4, 32, full.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
    np.testing.assert_array_equal(oracles.swizzle_32_4_4(scales), tiles.reshape(-1))


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5, 31, 32])
def test_packing_round_trips(K: int) -> None:
    rng = np.random.default_rng(K)
    fp4, fp6 = rng.integers(0, 16, (3, K), dtype=np.uint8), rng.integers(0, 64, (3, K), dtype=np.uint8)
    assert oracles.pack_fp4(fp4).shape == (3, -(-K // 2))
    assert oracles.pack_fp6(fp6).shape == (3, -(-K // 4) * 3)
    np.testing.assert_array_equal(oracles.unpack_fp4(oracles.pack_fp4(fp4), K), fp4)
    np.testing.assert_array_equal(oracles.unpack_fp6(oracles.pack_fp6(fp6), K), fp6)


# ---- known deviations of the libraries: if one of these fails, a library changed and its correction can go -----------


def test_known_deviation_onnx() -> None:
    convert = pytest.importorskip("onnx.numpy_helper").to_float8e8m0
    for element in oracles.ELEMENTS:
        e = oracles.spec(element)
        up = convert(np.float32([2.0**-127, 2.0**-130]), saturate=True, round_mode="up").view(np.uint8)
        assert up.tolist() == [1, 1]  # the contract: 00
        amax = np.nextafter(np.float32(2.0 ** (e.emax - 126)), np.float32(0))
        down = convert(np.array([amax / np.float32(2.0**e.emax)]), saturate=True, round_mode="down").view(np.uint8)
        assert down.tolist() == [1]
        assert oracles.mx_scale(amax, element, "floor") == 0


def test_known_deviation_gfloat() -> None:
    gfloat, formats = pytest.importorskip("gfloat"), pytest.importorskip("gfloat.formats")
    up = gfloat.RoundMode.TowardPositive
    assert gfloat.round_float(formats.format_info_mxfp8_e4m3.stype, 0.0, up, True) == 0
    assert gfloat.compute_scale_amax(8, np.array([np.inf, 1.0])) == 2.0**127
    for element in ("e2m3", "e3m2", "e2m1"):
        with pytest.raises(ValueError, match="No NaN"):
            gfloat.round_float(getattr(formats, f"format_info_ocp_{element}"), float("nan"))
    # A fraction of 1 - 2^-24 units of 2^-32 must not move for R = 0; gfloat's float64 sum rounds up to 1.
    v = float(np.nextafter(np.float32(0.5 * 2.0**-32), np.float32(0)))
    info, mode = formats.format_info_ocp_e2m1, gfloat.RoundMode.StochasticFastest
    assert gfloat.round_float(info, v, mode, True, srbits=0xFFFFFFFF, srnumbits=32) == 0.5
    assert oracles.encode_sr([v], "e2m1", [0]).tolist() == oracles.gfloat_encode_sr([v], "e2m1", [0]).tolist() == [0]


def test_known_deviation_ml_dtypes() -> None:
    ml_dtypes = oracles.third_party("ml_dtypes")
    with np.errstate(invalid="ignore", over="ignore"):
        big = np.float32([465.0]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        bigger = np.float32([61440.0]).astype(ml_dtypes.float8_e5m2).view(np.uint8)
    assert (big[0], bigger[0]) == (0x7F, 0x7C)
    nan = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    expected = {"e4m3": [0x7F, 0xFF], "e5m2": [0x7E, 0xFE], "e2m3": [0, 0x20], "e3m2": [0, 0x20], "e2m1": [0, 8]}
    for element, codes in expected.items():
        assert sorted(nan.astype(oracles.spec(element).dtype).view(np.uint8).tolist()) == codes
    e8m0 = np.float32([0.0, -1.0, 1.5]).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert e8m0.tolist() == [0xFF, 0xFF, 0x80]


def test_missing_package_is_an_import_error() -> None:
    with pytest.raises(oracles.OracleUnavailable, match="no_such_package"):
        oracles.third_party("no_such_package")
