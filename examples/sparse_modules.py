"""Four worked examples of sparse activation: an FFN, attention, a convolution, and two experts of different size."""

import torch
from torch import Tensor, nn

from seqboat import (
    BudgetConfig,
    GAUConfig,
    PaddedUnit,
    SparseModularActivation,
    activation,
    set_training_step,
    update_budgets,
)

torch.manual_seed(0)
d_model = 16
x = torch.randn(4, 64, d_model)


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, width), nn.GELU(), nn.Linear(width, d_model))


# 1. Sparse FFN. Token-wise modules need no change: they are called on (active tokens, d_model).
sparse = SparseModularActivation({"ffn": feed_forward(64)}, d_model)
y, _, routing = sparse(x)
print("FFN: share of active tokens", round(float(activation(routing).rate), 2))

# 2. Sparse attention, causal, with a working memory of 8 active tokens: whole and step by step are the same.
attention = SparseModularActivation(
    {"gau": GAUConfig(d_z=8, window=8).build(d_model, causal=True)}, d_model
).eval()
whole = attention(x)
state = attention.init_state(batch=4)
for t in range(64):
    y, state, routing = attention.step(x[:, t], state)
    torch.testing.assert_close(y, whole.y[:, t], rtol=1e-4, atol=1e-5)
print("attention: tokens seen", state.seen.tolist(), "taken", state.spent.flatten().tolist())


# 3. Sparse convolution. The adapter lays the active tokens of each row side by side; a kernel of 3 taps that looks
#    back only needs the last 2 tokens to go on later.
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
print("convolution: in two pieces as at once")

# 4. Two experts of different size that exclude each other. The large one may take a tenth of the tokens; a controller
#    brings the small one to half of them.
experts = SparseModularActivation(
    {"small": feed_forward(16), "large": feed_forward(256)},
    d_model,
    budget=BudgetConfig(per_token=1, cap=(1.0, 0.1), target=(0.5, 0.1)),
).train()
optimiser = torch.optim.Adam(experts.parameters(), lr=1e-3)
for step in range(60):
    set_training_step(experts, step)  # for schedules, of which there are none here
    batch = torch.randn(8, 64, d_model)
    loss = (batch + experts(batch).y - batch.roll(1, dims=-1)).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    update_budgets(experts)  # the controller takes its step
experts.eval()
routing = experts(x).routing
assert routing is not None
small, large = activation(routing).rate.tolist()
assert large <= 0.1 and not routing.active.all(dim=-1).any()
print(f"experts: small {small:.2f}, large {large:.2f} of the tokens, never both")

# 5. By hand: force modules on or off, move the threshold, give the decisions.
with experts.override(active={"large": False}):
    print("without the large expert:", activation(experts(x).routing).rate.tolist()[1])
with experts.override(mask=torch.arange(64).expand(4, 64) % 2 == 0):
    print("every second token, both experts:", activation(experts(x).routing).rate.tolist())
