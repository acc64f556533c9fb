"""Pictures of what heads look at: see `mha_fast.show.pictures`."""

from .show.pictures import head_maps, token_views, weight_maps

__all__ = ["head_maps", "token_views", "weight_maps"]
