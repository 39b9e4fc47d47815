"""Which blocks of which tiles a program of Hopper's product works on.

Whole tiles first, `rounds` of them for every program. What is left fills no round of programs; its blocks of K are
dealt out evenly instead: a program takes the end of one tile and the start of the next. Who takes which block depends
on the sizes alone, and so does the order in which the pieces of a tile are added: the same bytes every time.

Plain arithmetic, so that tests call the same functions with integers.
"""

# pyright: basic, reportCallIssue=false

from ._gluon import gluon


@gluon.jit
def tile_at(tile, tiles_m, tiles_n, group_m):
    """Row and column of a tile: down a group_m of rows, then right, so that what runs at one time shares operands."""
    above = tile // (group_m * tiles_n) * group_m
    height = group_m if tiles_m - above > group_m else tiles_m - above
    inside = tile % (group_m * tiles_n)
    return above + inside % height, inside // height


@gluon.jit
def share(program, programs, total):
    """Of `total` blocks in a row, those of one program: from, to."""
    return program * total // programs, (program + 1) * total // programs


@gluon.jit
def owner(block, programs, total):
    """The program whose share holds a block."""
    return ((block + 1) * programs + total - 1) // total - 1


@gluon.jit
def count_items(program, programs, tiles, rounds, blocks):
    """How many tiles, and pieces of tiles, a program works on."""
    begin, end = share(program, programs, (tiles - rounds * programs) * blocks)
    pieces = (end + blocks - 1) // blocks - begin // blocks
    return rounds + (pieces if end > begin else 0)


@gluon.jit
def item_at(item, program, programs, tiles, rounds, blocks):
    """A program's item: the tile, and its blocks of K from, to."""
    begin, end = share(program, programs, (tiles - rounds * programs) * blocks)
    left = begin // blocks + item - rounds  # among the tiles that are shared
    first, last = begin - left * blocks, end - left * blocks
    whole = item < rounds
    tile = program + item * programs if whole else rounds * programs + left
    start = 0 if whole or first < 0 else first
    stop = blocks if whole or last > blocks else last
    return tile, start, stop


@gluon.jit
def pieces_of(tile, programs, tiles, rounds, blocks):
    """The programs, from and to, that work on a shared tile."""
    total = (tiles - rounds * programs) * blocks
    left = tile - rounds * programs
    return owner(left * blocks, programs, total), owner(left * blocks + blocks - 1, programs, total) + 1


@gluon.jit
def count_turns(program, programs, tiles):
    """How many tiles a program takes where these differ in cost: one of each round, and perhaps one that is left."""
    rounds = tiles // programs
    return rounds + ((program + rounds) % programs < tiles - rounds * programs)


@gluon.jit
def turn_at(item, program, programs):
    """The tile of a program's turn. Each round it takes the next place: with one place for good, it might always meet
    the end of a group, which is soon done, or never."""
    return item * programs + (program + item) % programs
