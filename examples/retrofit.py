"""Make a trained Transformer sparse: train a tiny one on a file (the README by default), retrofit it, tune it."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from seqboat import RateSchedule, retrofit

if find_spec("transformers") is None:
    print("this example needs transformers: pip install 'seqboat[hf]'")
    sys.exit()

from transformers import LlamaConfig, LlamaForCausalLM

file = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md"
tokens = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8).long()
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))


def learn(optimizer: torch.optim.Optimizer) -> float:
    """One step on eight pieces of the text."""
    ids = torch.stack([tokens[i : i + 64] for i in torch.randint(0, len(tokens) - 64, (8,))])
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
print(f"dense: loss {[learn(optimizer) for _ in range(40)][-1]:.2f}")

# nothing changes at first: every token is active
prompt = tokens[None, :32]
with torch.no_grad():
    before = model(prompt).logits
    sparse = retrofit(model, {"model.layers.[12].mlp": "tokens"})
    assert torch.equal(model(prompt).logits, before)

# then the budget decreases while the model adapts
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = RateSchedule(final=0.5, begin=5, steps=20)
for step in range(40):
    sparse.set_rate(schedule(step))
    sparse.reset_statistics()
    loss = learn(optimizer)
print(
    f"sparse: loss {loss:.2f}, active fraction",
    {name[13:]: round(rate, 2) for name, rate in sparse.rates().items()},
)

# feed-forward blocks need no cache of their own: generation is the same with and without one
settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False}
cached, plain = (model.eval().generate(prompt, use_cache=use, **settings) for use in (True, False))
print("same text with and without a cache:", torch.equal(cached, plain))
