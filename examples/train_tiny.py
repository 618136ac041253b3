"""Learn a toy task in seconds: which symbol comes after the mark?

One token of a sequence of random symbols is a mark; the label is the symbol after it. Printed beside the loss: the
fraction of tokens that attend in each layer.
"""

import torch
import torch.nn.functional as F

from seqboat import BackboneConfig, Classifier, EMAConfig, GAUConfig, SeqBoatConfig, activation

SYMBOLS, MARK, LENGTH = 8, 8, 24


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences (count, LENGTH) and labels (count,)."""
    ids = torch.randint(0, SYMBOLS, (count, LENGTH))
    place = torch.randint(0, LENGTH - 1, (count, 1))
    label = ids.gather(1, place + 1)[:, 0]
    return ids.scatter(1, place, MARK), label


torch.manual_seed(0)
mixer = SeqBoatConfig(ssm=EMAConfig(d_state=4), gau=GAUConfig(d_z=16, window=16, max_positions=LENGTH))
model = Classifier(BackboneConfig(mixer=mixer, d_model=32, num_layers=2, vocab=SYMBOLS + 1), classes=SYMBOLS)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(1, 301):
    ids, label = draw(32)
    out = model(ids)
    loss = F.cross_entropy(out.logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        rates = [f"{float(activation(r).rate):.2f}" for r in out.routings if r is not None]
        print(f"step {step}: loss {loss.item():.3f}, activation per layer {' '.join(rates)}")

model.eval()
with torch.no_grad():
    ids, label = draw(1000)
    accuracy = (model(ids).logits.argmax(dim=1) == label).float().mean()
print(f"accuracy on new sequences: {accuracy:.3f} (chance {1 / SYMBOLS:.3f})")
