"""Functions of tokens that run over tiles of them: what runs, how it is cut, and what may."""

from hf_pyao.model.tiles.sliced import Rerun as Rerun
from hf_pyao.model.tiles.sliced import run_in_slices as run_in_slices
from hf_pyao.plan.options.tile_plan import TilePlan as TilePlan
from hf_pyao.plan.options.tile_plan import plan_tiles as plan_tiles
