"""Generate text with onnxruntime and NumPy alone: neither PyTorch nor seqboat is imported.

    seqboat export-onnx enwik8-small --out exported
    python examples/onnx/generate.py exported/step.onnx --prompt "The history of"

The state is a dictionary of arrays of constant size. --keep writes it to a file and --resume continues from there, on
this machine or another one, without reading the text again.
"""

import argparse
import json
import sys

import numpy as np
import onnxruntime

TYPES = {"float": np.float32, "int": np.int64}


def load(path):
    """The session, and a state before the first token."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # one token is too little work for more
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"{path} is not a whole ONNX file: {' '.join(str(error).split())[:120]}") from error
    about = session.get_modelmeta().custom_metadata_map
    if about.get("form") != "step" or about.get("bytes") != "true":
        raise ValueError(f"{path} is not the step of a language model of bytes")
    parts = json.loads(about["state"])
    return session, {part["name"]: np.zeros((1, *part["shape"]), TYPES[part["type"]]) for part in parts}


def resume(path, start):
    """A state from a file; it has to be of the same model."""
    try:
        with np.load(path) as file:
            state = dict(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a saved state: {error}") from error
    layers, expected = (len({name.split(".")[0] for name in s if "." in name}) for s in (state, start))
    if layers != expected:
        raise ValueError(f"{path} is the state of another model: it has {layers} layers, not {expected}")
    for name, part in start.items():
        if name not in state or state[name].shape != part.shape or state[name].dtype != part.dtype:
            raise ValueError(f"{path} is the state of another model: {name} does not fit")
    return state


def step(session, token, state):
    """The scores of the next byte, and the state after this one."""
    names = [output.name for output in session.get_outputs()]
    given = {f"state.{name}": part for name, part in state.items()}
    found = dict(zip(names, session.run(None, {"tokens": np.array([token]), **given}), strict=True))
    after = {name[5:]: part for name, part in found.items() if name.startswith("next.")}
    return found["logits"][0].astype(np.float64), after


def main():
    parser = argparse.ArgumentParser(description="Generate text with onnxruntime and NumPy alone.")
    parser.add_argument("model", help="step.onnx of an export")
    parser.add_argument("--prompt", default="The history of")
    parser.add_argument("--length", type=int, default=200, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", metavar="FILE", help="continue from a state that --keep wrote")
    parser.add_argument("--keep", metavar="FILE", help="write the state to a file (.npz)")
    options = parser.parse_args()
    try:
        session, state = load(options.model)
        if options.resume:
            state = resume(options.resume, state)
        prompt = options.prompt.encode()
        if not prompt:
            raise ValueError("the prompt is empty: there is nothing to continue")
    except ValueError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return 2
    random = np.random.default_rng(options.seed)
    sys.stdout.buffer.write(prompt)
    for byte in prompt:
        logits, state = step(session, byte, state)
    for _ in range(options.length):
        if options.temperature > 0:
            weights = np.exp((logits - logits.max()) / options.temperature)
            byte = int(random.choice(len(weights), p=weights / weights.sum()))
        else:
            byte = int(logits.argmax())
        sys.stdout.buffer.write(bytes([byte]))
        sys.stdout.buffer.flush()
        logits, state = step(session, byte, state)
    sys.stdout.buffer.write(b"\n")
    if options.keep:
        with open(options.keep, "wb") as file:
            np.savez(file, **state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
