"""Tuning constants: sizes of buffers, and crossovers between two exact ways of computing the same numbers."""

TILE_ROWS = 1024  # rows of a tile whose buffers fit in cache
TILE_BYTES = 96 * 2**20  # maximum bytes of the buffers that contract shared positions
FEWEST_TILE_ROWS = 160  # with fewer rows, a product of long rows is slow
PANEL_COLUMNS = 4096  # columns of rows written out at a time
INNER_SUMS_BYTES = 2 * 2**20  # bytes of inner sums over positions that fit in a core's cache
INNER_SUMS_DEVICE_BYTES = 64 * 2**20  # the same on an accelerator, where few large products are faster
ROWS_OVER_FACTORS = 8
ROWS_OVER_FACTORS_FEW_POSITIONS = 2
FEW_POSITIONS = 64
SEPARATE_MATRIX_ENTRIES = 512
