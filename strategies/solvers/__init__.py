"""The mathematics of each method: tensors in, a small frozen result out; nothing here knows Flower."""

from . import craft

__all__ = ["craft"]
