"""Functions of tokens that run over tiles of them: what runs, how it is cut, and the proof."""

from hf_pyao.model.tiles.tiled import TiledCall as TiledCall
from hf_pyao.model.tiles.tiled import run_in_tiles as run_in_tiles
from hf_pyao.plan.options.tile_plan import TilePlan as TilePlan
from hf_pyao.plan.options.tile_plan import plan_tiles as plan_tiles
