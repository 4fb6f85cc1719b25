"""The mathematics of each method: tensors in, a small frozen result out; nothing here knows Flower."""

from . import clair, craft, fedref, qp, simplex

__all__ = ["clair", "craft", "fedref", "qp", "simplex"]
