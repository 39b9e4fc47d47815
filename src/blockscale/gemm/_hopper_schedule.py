"""Stream-K schedule of the Hopper GEMM: which K-blocks of which output tiles each CTA works on.

Every CTA first takes `waves` whole tiles. The remaining tiles do not fill a wave. Their K-blocks are divided evenly
instead: a CTA takes the end of one tile and the start of the next. The assignment depends on the sizes alone, and so
does the order in which the partials of a split tile are reduced: the output has the same bytes in every run.

Plain arithmetic, so that tests call the same functions with integers.
"""

# pyright: basic, reportCallIssue=false

from ._gluon import gluon


@gluon.jit
def tile_at(tile, tiles_m, tiles_n, group_m):
    """Row and column of a tile. Rasterisation: down `group_m` rows of tiles, then right, so that CTAs that run at the
    same time share operands in L2."""
    above = tile // (group_m * tiles_n) * group_m
    height = group_m if tiles_m - above > group_m else tiles_m - above
    inside = tile % (group_m * tiles_n)
    return above + inside % height, inside // height


@gluon.jit
def k_block_range(cta, ctas, total):
    """Stream-K range [begin, end) of one CTA in `total` consecutive K-blocks."""
    return cta * total // ctas, (cta + 1) * total // ctas


@gluon.jit
def cta_of_k_block(block, ctas, total):
    """CTA whose `k_block_range` holds a K-block."""
    return ((block + 1) * ctas + total - 1) // total - 1


@gluon.jit
def count_work_units(cta, ctas, tiles, waves, blocks):
    """Number of work units of a CTA: whole tiles, then the K-ranges of split tiles."""
    begin, end = k_block_range(cta, ctas, (tiles - waves * ctas) * blocks)
    partials = (end + blocks - 1) // blocks - begin // blocks
    return waves + (partials if end > begin else 0)


@gluon.jit
def work_unit_at(unit, cta, ctas, tiles, waves, blocks):
    """Work unit of a CTA: the tile, and its K-blocks [start, stop)."""
    begin, end = k_block_range(cta, ctas, (tiles - waves * ctas) * blocks)
    left = begin // blocks + unit - waves  # index among the split tiles
    first, last = begin - left * blocks, end - left * blocks
    whole = unit < waves
    tile = cta + unit * ctas if whole else waves * ctas + left
    start = 0 if whole or first < 0 else first
    stop = blocks if whole or last > blocks else last
    return tile, start, stop


@gluon.jit
def ctas_of_split_tile(tile, ctas, tiles, waves, blocks):
    """CTAs [begin, end) that work on a split tile, in K order."""
    total = (tiles - waves * ctas) * blocks
    left = tile - waves * ctas
    return cta_of_k_block(left * blocks, ctas, total), cta_of_k_block(left * blocks + blocks - 1, ctas, total) + 1


@gluon.jit
def count_rotated_tiles(cta, ctas, tiles):
    """Number of tiles of a CTA under the rotated assignment: one in each full wave, and possibly one in the last."""
    waves = tiles // ctas
    return waves + ((cta + waves) % ctas < tiles - waves * ctas)


@gluon.jit
def rotated_tile_at(unit, cta, ctas):
    """Tile of a CTA in wave `unit`. Each wave shifts the assignment by one: grouped tiles differ in cost, and with a
    fixed assignment a CTA might get the short tiles at the ends of groups in every wave, or in none."""
    return unit * ctas + (cta + unit) % ctas
