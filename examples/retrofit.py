"""Make a trained transformer sparse: train a tiny one on a text, retrofit it, tune it to half of its tokens.

Reads the file that is named on the command line, or this project's README. Needs transformers (the `hf` extra).
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from seqboat import RateSchedule, retrofit

if find_spec("transformers") is None:
    print("this example needs transformers: pip install 'seqboat[hf]'")
    sys.exit()

from transformers import LlamaConfig, LlamaForCausalLM

text = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md").read_bytes()
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def draw(rows: int = 8, time: int = 64) -> torch.Tensor:
    """Pieces of the text, (rows, time)."""
    return torch.stack([tokens[i : i + time] for i in torch.randint(0, len(tokens) - time, (rows,))])


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)


def learn(batch: torch.Tensor) -> float:
    """One step."""
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()


loss = [learn(draw()) for _ in range(40)][-1]
print(f"dense: loss {loss:.2f}")

# nothing changes at first: every token is active
prompt = draw(rows=1, time=32)
with torch.no_grad():
    before = model.eval()(prompt).logits
    sparse = retrofit(model, {"model.layers.[12].self_attn": "sequence", "model.layers.[12].mlp": "tokens"})
    assert torch.equal(model(prompt).logits, before)

# then the budget falls while the model learns to live with it
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = RateSchedule(final=0.5, begin=5, steps=20)
model.train()
for step in range(40):
    sparse.set_rate(schedule(step))
    loss = learn(draw())
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.2f}, budget {sparse.rate:.2f}")

model.eval()
sparse.reset_statistics()
with torch.no_grad():
    model(draw(rows=32))
print(
    "share of tokens:", {name.removeprefix("model."): round(rate, 2) for name, rate in sparse.rates().items()}
)

# skipped tokens leave no keys and values, and generation with a cache says what it says without one
mask = torch.ones_like(prompt)
cached = model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False)
plain = model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False, use_cache=False)
print("generated alike with and without cache:", torch.equal(cached, plain))
sparse.undo()  # the weights stay, the routers go
