"""Binary sparse matrices: pairs of rows and columns as CSR with ones."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def binary(matrix: sp.spmatrix) -> sp.csr_matrix:
    """The same pattern with float32 ones: sorted columns, no duplicates, no explicit zeros."""
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    matrix.data[:] = 1
    return matrix


def without(matrix: sp.csr_matrix, other: sp.csr_matrix) -> sp.csr_matrix:
    """The pairs of a matrix that are not in another one: CSR, ones."""
    return binary(matrix - matrix.multiply(other != 0))
