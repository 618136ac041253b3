// Runs step.onnx in the browser: one byte at a time, with the state as a dictionary of tensors of constant size.
// Everything comes from the folder of this page, written by `make browser`.
import * as ort from "./ort/ort.wasm.min.mjs";

const $ = (id) => document.getElementById(id);
const here = new URL(".", import.meta.url);

// one token is too little work for several threads, which would also need special headers
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("ort/", here).href;
ort.env.logLevel = "error";

async function load() {
  const about = await (await get("model.json")).json();
  const bytes = await (await get("step.onnx")).arrayBuffer();
  const expected = about.files["step.onnx"];
  if (bytes.byteLength !== expected.bytes) {
    throw new Error(`step.onnx has ${bytes.byteLength} bytes, but model.json says ${expected.bytes}`);
  }
  if (globalThis.crypto?.subtle) {
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    const found = [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    if (found !== expected.sha256) throw new Error("step.onnx is damaged: its checksum is not that of model.json");
  }
  return { about, session: await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] }) };
}

async function get(name) {
  const answer = await fetch(new URL(name, here));
  if (!answer.ok) throw new Error(`${name} is missing: run make browser`);
  return answer;
}

// the state before the first token
function start(about) {
  const state = {};
  for (const { name, type, shape } of about.state) {
    const size = shape.reduce((a, b) => a * b, 1);
    const [kind, data] = type === "int" ? ["int64", new BigInt64Array(size)] : ["float32", new Float32Array(size)];
    state[name] = new ort.Tensor(kind, data, [1, ...shape]);
  }
  return state;
}

// scores of the next byte, how many layers attended to this one, and the state after it
async function step(session, byte, state) {
  const given = { tokens: new ort.Tensor("int64", BigInt64Array.of(BigInt(byte)), [1]) };
  for (const [name, tensor] of Object.entries(state)) given[`state.${name}`] = tensor;
  const found = await session.run(given);
  const after = {};
  for (const name of Object.keys(state)) after[name] = found[`next.${name}`];
  const modules = found.active.dims[2];
  let layers = 0;
  for (let i = 0; i < found.active.data.length; i += modules) layers += found.active.data[i];
  return { logits: found.logits.data, layers, state: after };
}

function sample(logits, temperature, random) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (temperature <= 0) return best;
  const weights = Array.from(logits, (value) => Math.exp((value - logits[best]) / temperature));
  let left = random() * weights.reduce((a, b) => a + b, 0);
  for (let i = 0; i < weights.length; i++) {
    left -= weights[i];
    if (left < 0) return i;
  }
  return best;
}

// a small generator of random numbers with a seed (mulberry32)
function seeded(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

function color(layers, all) {
  return `rgba(37, 99, 235, ${(0.6 * layers) / Math.max(all, 1)})`;
}

// Shows bytes as text. The bytes of one character share a box, which is colored by their mean.
class Writer {
  constructor(target, all) {
    this.target = target;
    this.all = all;
    this.waiting = [];
    target.replaceChildren();
  }

  write(byte, layers, prompt) {
    this.waiting.push({ byte, layers, prompt });
    const first = this.waiting[0].byte;
    const size = first < 0x80 ? 1 : first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    if (this.waiting.length < size && (byte >= 0x80 || this.waiting.length === 1)) return;
    const bytes = this.waiting.splice(0);
    let text = null;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes, (part) => part.byte));
    } catch {
      // not text: every byte by its number
    }
    if (text === null) bytes.forEach((part) => this.box(`\\x${part.byte.toString(16).padStart(2, "0")}`, [part], true));
    else this.box(text, bytes, false);
  }

  box(text, bytes, raw) {
    const box = document.createElement("span");
    const counts = bytes.map((part) => part.layers);
    box.textContent = text;
    box.title = `${counts.join(", ")} of ${this.all} layers attended`;
    box.dataset.layers = counts.join(" ");
    box.style.backgroundColor = color(counts.reduce((a, b) => a + b, 0) / counts.length, this.all);
    if (bytes[0].prompt) box.classList.add("prompt");
    if (raw) box.classList.add("raw");
    this.target.append(box);
  }
}

function say(text, error = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

let stopped = false;

async function generate({ about, session }) {
  const prompt = new TextEncoder().encode($("prompt").value);
  if (!prompt.length) return say("The prompt is empty: there is nothing to continue.", true);
  const random = seeded(Number($("seed").value));
  const temperature = Number($("temperature").value);
  const length = Math.max(1, Math.min(100000, Number($("length").value) || 1));
  const writer = new Writer($("text"), about.layers);
  let state = start(about);
  let logits = null;
  let shown = performance.now();
  const began = shown;
  for (let i = 0; i < prompt.length + length && !stopped; i++) {
    const byte = i < prompt.length ? prompt[i] : sample(logits, temperature, random);
    const found = await step(session, byte, state);
    ({ logits, state } = found);
    writer.write(byte, found.layers, i < prompt.length);
    if (performance.now() - shown > 30) {
      // let the browser draw
      await new Promise((resolve) => setTimeout(resolve, 0));
      shown = performance.now();
    }
    $("status").dataset.bytes = i + 1;
  }
  const seconds = (performance.now() - began) / 1000;
  const count = Number($("status").dataset.bytes);
  const size = Object.values(state).reduce((sum, part) => sum + part.data.byteLength, 0);
  say(`${count} bytes read, ${Math.round(count / seconds)} per second; the state takes ${(size / 1000).toFixed(0)} kB.`);
}

async function main() {
  try {
    const model = await load();
    const { about } = model;
    $("about").textContent =
      `${about.recipe}: ${about.layers} layers of width ${about.d_model}. Every byte is colored by the number of ` +
      "layers in which it attended. Nothing leaves this page.";
    for (let layers = 0; layers <= about.layers; layers++) {
      const box = document.createElement("span");
      box.textContent = layers === 1 ? "1 layer" : `${layers} layers`;
      box.style.backgroundColor = color(layers, about.layers);
      $("legend").append(box);
    }
    $("stop").addEventListener("click", () => (stopped = true));
    $("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      stopped = false;
      $("start").disabled = true;
      $("stop").disabled = false;
      $("status").dataset.state = "busy";
      say("");
      try {
        await generate(model);
      } catch (error) {
        say(String(error.message ?? error), true);
      }
      $("start").disabled = false;
      $("stop").disabled = true;
      $("status").dataset.state = "done";
    });
    $("start").disabled = false;
    $("status").dataset.state = "ready";
  } catch (error) {
    $("about").textContent = "";
    say(String(error.message ?? error), true);
    $("status").dataset.state = "failed";
  }
}

main();
