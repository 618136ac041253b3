"""Three modules made sparse: an unchanged FFN, attention with a working memory, an ordinary convolution."""

import torch
from torch import Tensor, nn

from seqboat import GAUConfig, PaddedUnit, SparseModularActivation, activation

torch.manual_seed(0)
d_model = 16
x = torch.randn(4, 64, d_model)

# 1. Sparse FFN. Token-wise modules need no change: they are called on (active tokens, d_model).
ffn = nn.Sequential(nn.Linear(d_model, 64), nn.GELU(), nn.Linear(64, d_model))
sparse = SparseModularActivation({"ffn": ffn}, d_model)
y, _, routing = sparse(x)
print("FFN: fraction of active tokens", round(float(activation(routing).rate), 2))

# 2. Sparse attention, causal, with a working memory of 8 active tokens: whole and step by step are the same.
gau = GAUConfig(d_z=8, window=8).build(d_model, causal=True)
attention = SparseModularActivation({"gau": gau}, d_model).eval()
whole = attention(x)
state = attention.init_state(batch=4)
for t in range(64):
    y, state, routing = attention.step(x[:, t], state)
    torch.testing.assert_close(y, whole.y[:, t], rtol=1e-4, atol=1e-5)
print("attention: tokens seen", state.seen.tolist(), "activated", state.spent.flatten().tolist())


# 3. Sparse convolution. The adapter puts the active tokens of each sequence side by side; a causal kernel
#    of 3 taps only needs the last 2 tokens to continue later.
class CausalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(d_model, d_model, kernel_size=3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return y


unit = PaddedUnit(CausalConvolution(), causal=True, context=2, d_model=d_model)
convolution = SparseModularActivation({"conv": unit}, d_model).eval()
whole = convolution(x)
first, state, _ = convolution(x[:, :20])
rest, state, _ = convolution(x[:, 20:], state=state)
torch.testing.assert_close(torch.cat([first, rest], dim=1), whole.y)
print("convolution: the same in two chunks as at once")
