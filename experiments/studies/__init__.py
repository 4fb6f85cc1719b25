"""Studies: what a paper's simulations show, as plain runs of a solver."""
