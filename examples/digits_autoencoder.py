"""Deep autoencoder on handwritten digits: the classic ill-conditioned problem of second-order optimization.

deepspeed --num_gpus 2 examples/digits_autoencoder.py --deepspeed_config configs/zero2.json
torchrun --nproc_per_node 2 examples/digits_autoencoder.py --deepspeed_config configs/zero3.json
torchrun --nproc_per_node 2 examples/digits_autoencoder.py --ddp
"""

from __future__ import annotations

from itertools import pairwise

from _common import digits, parse_args, read_config, start, train
from torch import Tensor, nn
from torch.nn.functional import mse_loss


class DigitsAutoencoder(nn.Module):
    """64-128-64-32-8-32-64-128-64 tanh autoencoder with a linear code. `forward` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 64, 32, 8, 32, 64, 128, 64]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Identity() if outputs == min(widths) else nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])  # the last layer is linear

    def forward(self, images: Tensor) -> Tensor:
        """Squared error: summed over the pixels, averaged over the batch."""
        decoded = self.layers(images.to(self.layers[0].weight.dtype))
        return mse_loss(decoded.float(), images, reduction="sum") / len(images)


if __name__ == "__main__":
    args = parse_args(__doc__)
    place = start(args.seed, args.local_rank, read_config(args))
    train(DigitsAutoencoder().to(place.device), digits().to(place.device), args, place)
