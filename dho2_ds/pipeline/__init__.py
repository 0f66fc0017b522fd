"""Curvature on ranks of its own: two worlds that train and compute curvature at the same time, and the bridge."""
