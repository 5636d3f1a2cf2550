"""A block of a transformer, in torch alone."""

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a perceptron, each added to its input."""

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
        """Each position depends on itself and those before it. The shape stays."""
        hidden = hidden + self.attend(self.before_attention(hidden))
        return hidden + self.mlp(self.before_mlp(hidden))

    def attend(self, hidden: Tensor) -> Tensor:
        """Causal attention with several heads."""
        rows, positions, width = hidden.shape
        projected = self.attention(hidden)
        by_head = projected.view(rows, positions, 3, self.heads, -1)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined = attended.transpose(1, 2).reshape(rows, positions, width)
        return self.projection(joined)
