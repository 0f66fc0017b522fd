"""Curvature numerics: Lanczos, Hessian-vector products, the eigenbasis and when to refresh it."""
