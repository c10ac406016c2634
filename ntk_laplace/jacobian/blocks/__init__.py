"""Blocks: Jacobian rows of one layer, or of several parameters, in the form that needs the least work and memory.

Rows are indexed by a cotangent k (a column of the root, or an output) and an example n. All three types are exact and
have the methods of `Block`:

* `Outer`: J_nk = Σ_t b_nkt ⊗ a_nt, a layer's output gradients b and inputs a over shared positions t;
* `Lookup`: an embedding's rows, where a is a one-hot token;
* `Dense`: rows that are written out, of one parameter or of several side by side.
"""

from ntk_laplace.jacobian.blocks.base import Block, Factored, LayerRows
from ntk_laplace.jacobian.blocks.clusters import Cluster, clusters, summed, written_out
from ntk_laplace.jacobian.blocks.dense import Dense
from ntk_laplace.jacobian.blocks.lookup import Lookup
from ntk_laplace.jacobian.blocks.outer import Outer, same_order

__all__ = ["Block", "Cluster", "Dense", "Factored", "LayerRows", "Lookup", "Outer", "clusters", "same_order",
           "summed", "written_out"]
