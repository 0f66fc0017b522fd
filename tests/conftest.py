"""Shared settings: one thread per process, since several ranks share the cores and the models are small."""

import torch

torch.set_num_threads(1)
