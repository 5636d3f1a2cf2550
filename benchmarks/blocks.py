"""A block of a transformer, in torch alone."""

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """As many positions as came in, each of which has seen those before it."""
        rows, positions, width = hidden.shape
        split = self.attention(self.before_attention(hidden)).view(
            rows, positions, 3, self.heads, -1
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(
            seen.transpose(1, 2).reshape(rows, positions, width)
        )
        return hidden + self.mlp(self.before_mlp(hidden))
