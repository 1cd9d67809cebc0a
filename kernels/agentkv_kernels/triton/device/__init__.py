"""What runs on the device. Importing it imports triton; a kernel is compiled at its first launch."""

from .attention import attend_tiles
from .copy_pages import copy_pages
from .merge import merge_parts
from .store_kv import store_kv

__all__ = ["attend_tiles", "copy_pages", "merge_parts", "store_kv"]
