"""Sparse modular activation by hand: route, compress, run the module, extract; then the same in one call."""

import torch
from torch import nn

from seqboat import SparseModularActivation, compress, extract, pack

torch.manual_seed(0)
batch, time, d_model = 2, 8, 16
x = torch.randn(batch, time, d_model)
ffn = nn.Sequential(nn.Linear(d_model, 64), nn.GELU(), nn.Linear(64, d_model))

# 1. A router decides per token: two logits, a temperature, the larger one wins.
logits, temperature = nn.Linear(d_model, 2), d_model**0.5
probs = torch.softmax(logits(x) / temperature, dim=-1)
active = probs.argmax(dim=-1) == 1
confidence = torch.where(active, probs[..., 1], 0.0)
print("active tokens per sequence:", active.sum(dim=1).tolist(), "of", time)

# 2. The paper's way: active tokens move to the front of a padded batch, and back afterward.
few, slot = compress(x, active)
by_compress = confidence[..., None] * extract(ffn(few), slot)
print("compressed batch:", tuple(few.shape), "of", tuple(x.shape))

# 3. Packed: the active tokens of all sequences as one array, without any padding.
packed = pack(active)
scaled = confidence.flatten()[packed.flat, None] * ffn(packed.take(x))
by_pack = packed.add(torch.zeros_like(x), scaled)
print("packed array:", tuple(packed.take(x).shape), "sequences begin at", packed.offsets.tolist())
torch.testing.assert_close(by_pack, by_compress)

# 4. In one call: any module becomes sparse. Load the same router and compare.
sparse = SparseModularActivation({"ffn": ffn}, d_model)
sparse.router.logits.load_state_dict(logits.state_dict())  # type: ignore[union-attr]
y, _, routing = sparse(x)
assert torch.equal(routing.active[..., 0], active)
torch.testing.assert_close(y, by_pack)

# 5. The gradient reaches the router through the confidence, although the decision is discrete.
y.square().mean().backward()
gradient = sparse.router.logits.weight.grad  # type: ignore[union-attr]
assert isinstance(gradient, torch.Tensor)
print("all three agree; gradient norm of the router:", f"{gradient.norm():.1e}")
