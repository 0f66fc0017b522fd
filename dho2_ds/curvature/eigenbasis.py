"""The eigenbasis a training rank holds: k sharded eigenvectors, k eigenvalues and what the safety rules need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Eigenbasis:
    """Leading eigenpairs of the (preconditioned) Hessian.

    Attributes:
        vectors: (k, n_local) local rows, orthonormal over all ranks, in the storage dtype.
        eigenvalues: (k,) float64 on CPU, by falling magnitude, the same on every rank.
        next_eigenvalue: magnitude of the largest Ritz value that was not kept (0 when none).
        born: optimizer step at which it was computed.
    """

    vectors: Tensor
    eigenvalues: Tensor
    next_eigenvalue: float
    born: int

    @property
    def k(self) -> int:
        return self.vectors.shape[0]

    @cached_property
    def magnitudes(self) -> Tensor:
        """(k,) float64, beside the vectors: |lambda| with the floor applied.

        The floor is the larger of the smallest kept magnitude and the next Ritz value: no kept direction is moved
        further than the curvature just outside the basis would allow.
        """
        magnitudes = self.eigenvalues.abs()
        floor = max(float(magnitudes.min()), self.next_eigenvalue)
        return magnitudes.clamp_min(max(floor, torch.finfo(torch.float64).tiny)).to(self.vectors.device)

    def lr_scale(self, rule: str, base: str, max_lr_scale: float) -> float:
        """s, by which the base optimizer's lr may grow outside the span.

        ``adaptive``: clip(|lambda_1| / |lambda_(k+1)|, 1, max_lr_scale). ``fosi``: 1 for Adam and AdamW, else
        clip(|lambda_1| / |lambda_k|, 1, max_lr_scale), as in the code released with FOSI (arXiv 2302.08484).
        """
        top = float(self.eigenvalues.abs().max())
        if rule == "fosi":
            if base != "sgd":
                return 1.0
            limit = float(self.eigenvalues.abs().min())
        else:
            limit = self.next_eigenvalue
        ratio = top / limit if limit > 0 else max_lr_scale
        return min(max(ratio, 1.0), max_lr_scale)
