"""Functions of tokens that run over tiles of them: what runs, how it is cut, and the proof."""

from hf_pyao.tiling.tile_plan import TilePlan as TilePlan
from hf_pyao.tiling.tile_plan import plan_tiles as plan_tiles
from hf_pyao.tiling.tiled import TiledCall as TiledCall
from hf_pyao.tiling.tiled import run_in_tiles as run_in_tiles
