"""Binary sparse matrices: (row, column) pairs as CSR with ones."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def to_binary(matrix: sp.spmatrix) -> sp.csr_matrix:
    """Return the sparsity pattern as CSR with float32 ones: sorted columns, no duplicates, no explicit zeros."""
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    matrix.data[:] = 1
    return matrix


def without(matrix: sp.csr_matrix, other: sp.csr_matrix) -> sp.csr_matrix:
    """Return the pairs of `matrix` that are not in `other`: CSR, ones."""
    return to_binary(matrix - matrix.multiply(other != 0))
