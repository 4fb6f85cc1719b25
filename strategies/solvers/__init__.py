"""The mathematics of each method: tensors in, a small frozen result out; nothing here knows Flower."""

from . import craft, fedref, qp, simplex

__all__ = ["craft", "fedref", "qp", "simplex"]
