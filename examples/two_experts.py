"""Two experts of different size under a budget: each token uses at most one, and the large one is expensive."""

import torch
from torch import nn

from seqboat import BudgetConfig, SparseModularActivation, activation, extra_loss

torch.manual_seed(0)
d_model = 16


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, width), nn.GELU(), nn.Linear(width, d_model))


# At most one expert per token. The large one may process at most a tenth of the tokens; a term of the loss pulls the
# small one to about half of them.
experts = SparseModularActivation(
    {"small": feed_forward(16), "large": feed_forward(256)},
    d_model,
    budget=BudgetConfig(per_token=1, cap=(1.0, 0.1), target=(0.5, 0.1)),
)
optimizer = torch.optim.Adam(experts.parameters(), lr=1e-3)
for _ in range(100):
    x = torch.randn(8, 64, d_model)
    # large inputs should be negated, small ones left alone
    wanted = torch.where(x.norm(dim=-1, keepdim=True) > 4.5, -x, x)
    out = experts(x)
    loss = (x + out.y - wanted).square().mean() + (extra_loss(experts, [out.routing]) or 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

experts.eval()
x = torch.randn(4, 200, d_model)
routing = experts(x).routing
assert routing is not None
small, large = activation(routing).rate.tolist()
assert large <= 0.1 and not routing.active.all(dim=-1).any()
print(f"small {small:.2f}, large {large:.2f} of the tokens, never both")

# Manual decisions: switch a module off, or pass a mask.
with experts.override(active={"large": False}):
    print("without the large expert:", activation(experts(x).routing).rate.tolist()[1])
with experts.override(mask=torch.arange(200).expand(4, 200) % 2 == 0):
    print("every second token, both experts:", activation(experts(x).routing).rate.tolist())
