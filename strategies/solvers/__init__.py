"""The mathematics of each method: tensors in, a small frozen result out; nothing here knows Flower."""

from . import craft, qp, simplex

__all__ = ["craft", "qp", "simplex"]
