"""Read a long sequence at once, in chunks and token by token: same numbers, and a state that does not grow."""

import torch

from seqboat import BackboneConfig, EMAConfig, GAUConfig, LanguageModel, SeqBoatConfig, state_bytes

torch.manual_seed(0)
mixer = SeqBoatConfig(
    ssm=EMAConfig(d_state=8), gau=GAUConfig(d_z=32, window=16, positions="rotary"), causal=True
)
config = BackboneConfig(mixer=mixer, d_model=64, num_layers=3, vocab=256, scaled_embedding=True)
model = LanguageModel(config).eval()
text = torch.randint(0, 256, (2, 200))

with torch.no_grad():
    # at once
    whole = model(text).logits

    # in chunks of any length, passing the state along
    state, pieces = model.init_state(batch=2), []
    for piece in text.split([100, 1, 37, 62], dim=1):
        out = model(piece, state=state)
        state = out.state
        pieces.append(out.logits)
        print(f"after {int(state.seen[0]):3d} tokens the state takes {state_bytes(state):,} bytes")
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-4)

    # token by token
    state, steps = model.init_state(batch=2), []
    for token in text.unbind(dim=1):
        out = model.step(token, state)
        state = out.state
        steps.append(out.logits)
    torch.testing.assert_close(torch.stack(steps, dim=1), whole, atol=1e-4, rtol=1e-4)
    print(f"after {int(state.seen[0]):3d} steps  the state takes {state_bytes(state):,} bytes")

    # continue from there: the most likely byte each time (the weights are random, so is the text)
    token, said = whole[:, -1].argmax(dim=-1), []
    for _ in range(8):
        said.append(token)
        out = model.step(token, state)
        token, state = out.logits.argmax(dim=-1), out.state
print("three ways agree; the next bytes would be", torch.stack(said, dim=1).tolist())
