"use strict";
// One sample at a time: its tokens, pixels or samples by confidence in one or two layers, and what a token's query sees.

(() => {
  const info = numbers.explorer;
  if (!info) return;
  const find = (id) => document.getElementById(id);
  const state = { sample: null, number: 0, part: 0, layers: [...info.start], query: null, cursor: 0, over: null, view: "map" };
  let panels = [];

  // samples: compressed arrays, unpacked when they are first looked at

  const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };
  const cache = new Map();

  async function load(number) {
    if (!cache.has(number)) cache.set(number, unpack(find(`sample-${number}`).textContent));
    return cache.get(number);
  }

  async function unpack(base64) {
    const packed = Uint8Array.from(atob(base64.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const raw = await new Response(stream).arrayBuffer();
    const size = new DataView(raw).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, size)));
    let at = 4 + size;
    head.array = {};
    for (const [name, type, length] of head.arrays) {
      head.array[name] = new TYPES[type](raw, at, length);
      at += length * TYPES[type].BYTES_PER_ELEMENT;
    }
    head.layers = head.sequences.map((sequence, s) => sequence.layers.map((layer, l) => (layer ? unpackLayer(head, s, l, sequence.length) : null)));
    return head;
  }

  /** Which tokens are active, their probabilities, and the slots of active tokens. */
  function unpackLayer(head, s, l, length) {
    const get = (name) => head.array[`${s}.${l}.${name}`];
    const bits = get("active"), probs = get("probs");
    const slot = new Int32Array(length).fill(-1), positions = [];
    for (let i = 0; i < length; i++) {
      if ((bits[i >> 3] >> (i & 7)) & 1) {
        slot[i] = positions.length;
        positions.push(i);
      }
    }
    return { slot, positions, prob: (i) => probs[i] / 255, get };
  }

  const sequence = () => state.sample.sequences[state.part];
  const layerOf = (number) => state.sample.layers[state.part][number];
  const word = (i) => {
    const ids = state.sample.array[`${state.part}.text`];
    return ids ? state.sample.strings[ids[i]] : null;
  };

  /** What the query of a token sees: keys from `first` up to `end` (slots), and its largest weights as fractions of their sum. */
  function seen(number, position) {
    const layer = layerOf(number);
    if (!layer || layer.slot[position] < 0 || !layer.get("before")) return null;
    const slot = layer.slot[position], count = layer.positions.length, keep = info.keep;
    const first = slot - layer.get("before")[slot], end = slot + layer.get("after")[slot] + 1;
    const weights = new Map();
    let shown = 0;
    if (keep) {
      const peak = layer.get("peak")[slot] / 65535, top = layer.get("top"), ratio = layer.get("ratio");
      for (let k = 0; k < Math.min(keep, end - first); k++) {
        // columns are stored one after the other: the largest weight of all queries, then the second largest, ...
        const part = k ? (ratio[(k - 1) * count + slot] / 255) ** 2 : 1;
        if (part * peak <= 0) continue;
        weights.set(layer.positions[first + top[k * count + slot]], part * peak);
        shown += part * peak;
      }
    }
    const sums = layer.get("sum");
    return { first, end, layer, weights, shown: Math.min(shown, 1), most: Math.max(...weights.values(), 1e-9), sum: sums ? sums[slot] : null };
  }

  // colors

  const confidenceColor = (p) => shade(CONFIDENCE, (p - info.low) / (1 - info.low));
  const OUTSIDE = [206, 211, 217], VISIBLE = [255, 250, 238];

  /** The color of every token of a layer; null is white. */
  function paint(number) {
    const layer = layerOf(number), length = sequence().length, colors = new Array(length).fill(null);
    if (!layer) return { colors, view: null };
    const view = state.query === null ? null : seen(number, state.query);
    layer.positions.forEach((i, slot) => {
      if (!view) colors[i] = confidenceColor(layer.prob(i));
      else if (view.weights.has(i)) colors[i] = shade(WEIGHT, 0.12 + 0.88 * Math.sqrt(view.weights.get(i) / view.most));
      else colors[i] = slot >= view.first && slot < view.end ? VISIBLE : OUTSIDE;
    });
    return { colors, view };
  }

  // words

  const layerName = (number) => info.layers[number];
  const place = (i) => {
    if (info.picture) return `row ${Math.floor(i / info.picture[1]) + 1}, column ${(i % info.picture[1]) + 1}`;
    return `position ${i + 1} of ${sequence().length}`;
  };

  function decision(number, i) {
    const layer = layerOf(number);
    if (!layer) return "no router";
    return layer.slot[i] >= 0 ? `activated, confidence ${layer.prob(i).toFixed(2)}` : `not activated (probability ${layer.prob(i).toFixed(2)})`;
  }

  function describe(i) {
    const text = word(i), parts = [];
    if (text !== null) parts.push(`“${text}”`);
    parts.push(place(i));
    for (const number of shownLayers()) parts.push(`${layerName(number)}: ${decision(number, i)}`);
    return parts.join(" · ");
  }

  const shownLayers = () => (find("both").checked ? state.layers : state.layers.slice(0, 1));

  // panels: tokens in a text, pixels of an image, samples of a wave

  function tokenPanel(index, box) {
    const list = make("div", { class: `tokens ${info.modality}`, role: "listbox", tabindex: 0 });
    const spans = [];
    for (let i = 0; i < sequence().length; i++) {
      const span = make("span", { class: "tok", role: "option", id: `tok-${index}-${i}`, "aria-selected": "false" }, word(i));
      span.dataset.i = i;
      spans.push(span);
      list.append(span);
      if (word(i) === "⏎") list.append(make("br"));
    }
    box.append(list);
    const at = (event) => {
      const target = event.target.closest(".tok");
      return target ? Number(target.dataset.i) : null;
    };
    list.addEventListener("pointermove", (event) => hoverAt(at(event)));
    list.addEventListener("pointerleave", () => hoverAt(null));
    list.addEventListener("click", (event) => {
      const i = at(event);
      if (i !== null) choose(i);
    });
    let marked = [];
    const line = (i, direction) => {
      // the token above or below: first of another line, then the nearest in it
      const from = spans[i].getBoundingClientRect();
      let k = i + direction;
      while (spans[k] && Math.abs(spans[k].getBoundingClientRect().top - from.top) < from.height / 2) k += direction;
      if (!spans[k]) return i;
      const top = spans[k].getBoundingClientRect().top;
      let best = k;
      while (spans[k] && Math.abs(spans[k].getBoundingClientRect().top - top) < from.height / 2) {
        if (Math.abs(spans[k].getBoundingClientRect().left - from.left) < Math.abs(spans[best].getBoundingClientRect().left - from.left)) best = k;
        k += direction;
      }
      return best;
    };
    return {
      focus: list,
      paint({ colors }) {
        colors.forEach((color, i) => {
          spans[i].style.backgroundColor = color ? css(color) : "";
          spans[i].style.color = color && isDark(color) ? "#fff" : "";
        });
      },
      mark() {
        for (const span of marked) {
          span.classList.remove("cursor", "query");
          span.setAttribute("aria-selected", "false");
        }
        const cursor = spans[state.cursor];
        cursor.classList.add("cursor");
        // names for screen readers are long: only for the token at the cursor
        cursor.setAttribute("aria-label", `${word(state.cursor)}, ${place(state.cursor)}, ${decision(state.layers[index], state.cursor)}`);
        list.setAttribute("aria-activedescendant", cursor.id);
        marked = [cursor];
        if (state.query !== null) {
          spans[state.query].classList.add("query");
          spans[state.query].setAttribute("aria-selected", "true");
          marked.push(spans[state.query]);
        }
      },
      reveal() {
        const box = list.getBoundingClientRect(), own = spans[state.cursor].getBoundingClientRect();
        if (own.top < box.top) list.scrollTop -= box.top - own.top + 20;
        if (own.bottom > box.bottom) list.scrollTop += own.bottom - box.bottom + 20;
      },
      step: { ArrowUp: (i) => line(i, -1), ArrowDown: (i) => line(i, 1) },
      leap: 50,
    };
  }

  function surface(box, label) {
    const element = make("canvas", { class: "surface", tabindex: 0, role: "application", "aria-roledescription": label });
    box.append(element);
    const context = element.getContext("2d");
    const resize = (height) => {
      const ratio = window.devicePixelRatio || 1, width = element.clientWidth;
      element.width = Math.round(width * ratio);
      element.height = Math.round(height * ratio);
      element.style.height = `${height}px`;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      return width;
    };
    return { element, context, resize };
  }

  const input = (i, channel) => {
    const values = state.sample.array[`${state.part}.values`], channels = sequence().channels;
    return values[i * channels + Math.min(channel, channels - 1)];
  };

  /** Pixels as a picture, one canvas pixel each; colors may be null everywhere. */
  function raster(colors, overlay) {
    const [height, width] = info.picture;
    const small = make("canvas", { width, height }), context = small.getContext("2d"), data = context.createImageData(width, height);
    for (let i = 0; i < sequence().length; i++) {
      const gray = sequence().channels === 3 ? [0, 1, 2].map((c) => input(i, c)) : [input(i, 0), input(i, 0), input(i, 0)];
      let color = colors ? colors[i] || [255, 255, 255] : gray;
      if (overlay) color = colors[i] ? colors[i].map((v, c) => Math.round(0.7 * v + 0.3 * gray[c])) : gray;
      data.data.set([...color, 255], 4 * i);
    }
    context.putImageData(data, 0, 0);
    return small;
  }

  function picturePanel(index, box) {
    const { element, context, resize } = surface(box, "map of pixels");
    const [rows, columns] = info.picture;
    let last = null;
    const drawAll = () => {
      if (!last || !element.clientWidth) return;
      const width = resize((element.clientWidth * rows) / columns), size = width / columns;
      context.imageSmoothingEnabled = false;
      context.drawImage(raster(last.colors, state.view === "overlay"), 0, 0, width, size * rows);
      const ring = (i, color, grow) => {
        // around the pixel, but never beyond the picture
        const x = Math.max(1, (i % columns) * size - grow), y = Math.max(1, Math.floor(i / columns) * size - grow);
        const right = Math.min(width - 1, ((i % columns) + 1) * size + grow);
        const bottom = Math.min(size * rows - 1, (Math.floor(i / columns) + 1) * size + grow);
        for (const [thick, ink] of [[3, "#fff"], [1.6, color]]) {
          context.lineWidth = thick;
          context.strokeStyle = ink;
          context.strokeRect(x, y, right - x, bottom - y);
        }
      };
      if (state.query !== null) ring(state.query, "#d01c8b", 3);
      ring(state.cursor, "#111", 1.5);
    };
    const at = (event) => {
      const b = element.getBoundingClientRect();
      const column = Math.floor(((event.clientX - b.left) / b.width) * columns), row = Math.floor(((event.clientY - b.top) / b.height) * rows);
      const i = row * columns + column;
      return row >= 0 && column >= 0 && row < rows && column < columns && i < sequence().length ? i : null;
    };
    element.addEventListener("pointermove", (event) => hoverAt(at(event)));
    element.addEventListener("pointerleave", () => hoverAt(null));
    element.addEventListener("click", (event) => {
      if (at(event) !== null) choose(at(event));
    });
    new ResizeObserver(drawAll).observe(box);
    return {
      focus: element,
      paint(painted) {
        last = painted;
        drawAll();
      },
      mark: drawAll,
      reveal() {},
      step: { ArrowUp: (i) => i - columns, ArrowDown: (i) => i + columns },
      leap: 4 * columns,
    };
  }

  function wavePanel(index, box) {
    const { element, context, resize } = surface(box, "wave");
    const HEIGHT = 250, NEAR = 160;
    let last = null;
    const begin = () => Math.max(0, Math.min(state.cursor - NEAR / 2, sequence().length - NEAR));
    const column = (colors, from, to) => {
      // several samples share a column: the strongest color of those that are activated
      let best = null;
      for (let i = from; i < to; i++) {
        const c = colors[i];
        if (c && (!best || c[0] + c[1] + c[2] < best[0] + best[1] + best[2])) best = c;
      }
      return best;
    };
    const band = (colors, from, to, width, top, ink) => {
      const count = to - from, middle = top + 42;
      context.fillStyle = "#fff";
      context.fillRect(0, top, width, 112);
      // a line where a sample is wider than a pixel, and otherwise the range of the samples in every column
      const single = count < width;
      const height = (i) => middle - ((input(i, 0) - 128) / 128) * 40;
      if (single) {
        context.beginPath();
        for (let i = from; i < to; i++) context.lineTo(((i - from + 0.5) / count) * width, height(i));
        context.strokeStyle = ink;
        context.lineWidth = 1.5;
        context.stroke();
        for (let i = from; i < to; i++) {
          if (!colors[i]) continue;
          context.fillStyle = css(colors[i]);
          context.fillRect(((i - from) / count) * width, top + 88, width / count, 24);
          if (state.view !== "overlay") continue;
          context.beginPath();
          context.arc(((i - from + 0.5) / count) * width, height(i), 3, 0, 7);
          context.fill();
        }
      }
      for (let x = 0; x < width && !single; x++) {
        const a = from + Math.floor((x * count) / width), b = Math.max(a + 1, from + Math.floor(((x + 1) * count) / width));
        const color = column(colors, a, b);
        if (color) {
          context.fillStyle = css(color);
          context.fillRect(x, top + 88, 1, 24);
        }
        let low = Infinity, high = -Infinity;
        for (let i = a; i < b; i++) {
          low = Math.min(low, height(i));
          high = Math.max(high, height(i));
        }
        context.fillStyle = color && state.view === "overlay" ? css(color) : ink;
        context.fillRect(x, low, 1, Math.max(1.5, high - low));
      }
      context.strokeStyle = "#c4cad1";
      context.lineWidth = 1;
      context.strokeRect(0.5, top + 87.5, width - 1, 25);
    };
    const drawAll = () => {
      if (!last || !element.clientWidth) return;
      const width = resize(HEIGHT), length = sequence().length, start = begin(), near = Math.min(NEAR, length);
      context.fillStyle = "#fff";
      context.fillRect(0, 0, width, HEIGHT);
      band(last.colors, 0, length, width, 0, "#46505a");
      band(last.colors, start, start + near, width, 132, "#46505a");
      // where the lower half is in the upper one
      context.fillStyle = "rgba(32,115,178,0.14)";
      const x0 = (start / length) * width, x1 = ((start + near) / length) * width;
      context.fillRect(x0, 0, Math.max(2, x1 - x0), 112);
      context.fillStyle = "#55606b";
      context.font = "11px system-ui, sans-serif";
      context.fillText(`samples ${start + 1} to ${start + near}`, 4, 128);
      const ring = (i, color) => {
        context.strokeStyle = color;
        context.lineWidth = 2;
        if (i >= start && i < start + near) context.strokeRect(((i - start) / near) * width, 134, Math.max(3, width / near), 110);
        context.beginPath();
        context.moveTo((i / length) * width, 0);
        context.lineTo((i / length) * width, 112);
        context.stroke();
      };
      if (state.query !== null) ring(state.query, "#d01c8b");
      ring(state.cursor, "#111");
    };
    const at = (event) => {
      const b = element.getBoundingClientRect(), x = (event.clientX - b.left) / b.width, length = sequence().length;
      const i = event.clientY - b.top < 120 ? Math.floor(x * length) : begin() + Math.floor(x * Math.min(NEAR, length));
      return i >= 0 && i < length ? i : null;
    };
    element.addEventListener("pointermove", (event) => hoverAt(at(event)));
    element.addEventListener("pointerleave", () => hoverAt(null));
    element.addEventListener("click", (event) => {
      const i = at(event);
      if (i === null) return;
      // the upper half finds a place, the lower half a sample
      if (event.clientY - element.getBoundingClientRect().top < 120) move(i);
      else choose(i);
    });
    new ResizeObserver(drawAll).observe(box);
    return {
      focus: element,
      paint(painted) {
        last = painted;
        drawAll();
      },
      mark: drawAll,
      reveal() {},
      step: { ArrowUp: (i) => i - 10, ArrowDown: (i) => i + 10 },
      leap: NEAR,
    };
  }

  const makers = { bytes: tokenPanel, tokens: tokenPanel, image: picturePanel, wave: wavePanel };

  function build() {
    const numbersShown = shownLayers();
    const home = find("panels");
    home.replaceChildren();
    home.classList.toggle("single", numbersShown.length < 2);
    home.classList.toggle("pictures", info.modality === "image");
    if (!sequence().length) {
      panels = [];
      home.append(make("p", { class: "caption" }, "This sequence is empty."));
      for (const id of ["status", "legend", "inspector"]) find(id).replaceChildren();
      return;
    }
    if (info.modality === "image") {
      const size = `${info.picture[0]} by ${info.picture[1]} pixels, read row by row`;
      const box = make("div", { class: "panel" }, make("h3", {}, "input"), make("p", { class: "caption" }, size));
      const shown = make("canvas", { class: "surface", role: "img", "aria-label": "The input image" });
      box.append(shown);
      home.append(box);
      const small = raster(null, false);
      shown.width = small.width * 8;
      shown.height = small.height * 8;
      const context = shown.getContext("2d");
      context.imageSmoothingEnabled = false;
      context.drawImage(small, 0, 0, shown.width, shown.height);
    }
    panels = numbersShown.map((_, index) => {
      const box = make("div", { class: "panel" });
      const select = make("select", { "aria-label": `Layer of panel ${index + 1}` });
      info.layers.forEach((name, number) => {
        const option = make("option", { value: number }, name);
        option.selected = number === state.layers[index];
        select.append(option);
      });
      const caption = make("p", { class: "caption" });
      box.append(make("h3", {}, select), caption);
      home.append(box);
      const panel = makers[info.modality](index, box);
      select.addEventListener("change", () => {
        state.layers[index] = Number(select.value);
        refresh();
      });
      panel.focus.addEventListener("keydown", (event) => keys(event, panel));
      panel.focus.addEventListener("focus", () => tell(false));
      return { ...panel, caption, index };
    });
    refresh();
  }

  function keys(event, panel) {
    const jumps = {
      ArrowLeft: (i) => i - 1,
      ArrowRight: (i) => i + 1,
      Home: () => 0,
      End: () => sequence().length - 1,
      PageUp: (i) => i - panel.leap,
      PageDown: (i) => i + panel.leap,
      ...panel.step,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in jumps) move(Math.min(sequence().length - 1, Math.max(0, jumps[event.key](state.cursor))));
    else if (event.key === "Enter" || event.key === " ") choose(state.cursor);
    else return;
    event.preventDefault();
  }

  function hoverAt(i) {
    if (state.over === i) return;
    state.over = i;
    tell(false);
  }

  function move(i) {
    state.cursor = i;
    state.over = null;
    for (const panel of panels) {
      panel.mark();
      panel.reveal();
    }
    inspect();
    tell(true);
  }

  function choose(i) {
    state.cursor = i;
    state.over = null;
    state.query = state.query === i ? null : i;
    refresh();
    tell(true);
  }

  function leave() {
    if (state.query === null) return;
    state.query = null;
    refresh();
    tell(true);
  }

  /** The line above the panels; for screen readers only what was asked for, not what the mouse happens to cross. */
  function tell(aloud) {
    const i = state.over === null ? state.cursor : state.over;
    find("status").textContent = describe(i);
    if (aloud) find("live").textContent = describe(i) + (state.query === null ? "" : `. ${panels.map((p) => p.caption.textContent).join(" ")}`);
  }

  function caption(number, view) {
    const layer = layerOf(number), length = sequence().length, unit = info.unit;
    if (!layer) return "This layer has no router.";
    if (state.query !== null && !view) {
      return layer.slot[state.query] < 0 ? `This ${unit} is not activated in this layer: it sees nothing.` : "This layer's module is not attention: there are no weights to show.";
    }
    if (!view) {
      const count = layer.positions.length;
      return `${spell(count)} of ${spell(length)} activated (${spell(count / length, "percent")})`;
    }
    const from = layer.positions[view.first] + 1, to = layer.positions[view.end - 1] + 1;
    const sees = `Sees ${spell(view.end - view.first)} activated ${view.end - view.first === 1 ? unit : `${unit}s`} at positions ${spell(from)} to ${spell(to)}`;
    let shown = `; colored: the ${view.weights.size} largest weights, ${spell(view.shown, "percent")} of all`;
    if (view.weights.size === view.end - view.first) shown = "; all colored by their weight";
    if (!view.weights.size) shown = info.keep ? ", but gives them all zero weight" : "; its weights are left out to keep this page small";
    return `${sees}${shown}.`;
  }

  function refresh() {
    if (!panels.length) return;
    for (const panel of panels) {
      const painted = paint(state.layers[panel.index]);
      panel.caption.textContent = caption(state.layers[panel.index], painted.view);
      panel.focus.setAttribute("aria-label", `${layerName(state.layers[panel.index])}, ${panel.caption.textContent}`);
      panel.paint(painted);
      panel.mark();
    }
    find("back").hidden = state.query === null;
    legend();
    inspect();
    tell(false);
  }

  function legend() {
    const swatch = (color, text) => {
      const box = make("span", { class: "swatch" });
      box.style.backgroundColor = color;
      return make("span", { class: "entry" }, box, text);
    };
    const scale = (colors, low, high) => {
      const strip = make("span", { class: "strip" });
      for (let i = 0; i < 24; i++) {
        const piece = make("span");
        piece.style.backgroundColor = css(shade(colors, i / 23));
        strip.append(piece);
      }
      return make("span", { class: "entry" }, low, strip, high);
    };
    const views = shownLayers().map((number) => state.query !== null && seen(number, state.query) !== null);
    const parts = [swatch("#fff", "not activated")];
    if (views.includes(false)) parts.push(scale(CONFIDENCE, `confidence ${info.low}`, "1"));
    if (views.includes(true)) parts.push(scale(WEIGHT, "small", "large weight"), swatch(css(VISIBLE), "visible, weight zero or not shown"), swatch(css(OUTSIDE), "activated, not visible"));
    find("legend").replaceChildren(...parts);
  }

  function meter(fraction, name) {
    const bar = make("span", { class: `meter ${name}` }), inner = make("span");
    inner.style.width = `${Math.round(100 * Math.min(1, fraction))}%`;
    bar.append(inner);
    return bar;
  }

  function inspect() {
    const i = state.cursor, text = word(i);
    const rows = info.layers.map((name, number) => {
      const layer = layerOf(number);
      const active = layer && layer.slot[i] >= 0;
      return make("tr", { class: active ? "on" : "" }, make("th", { scope: "row" }, name), make("td", {}, layer ? (active ? "activated" : "not activated") : "no router"), make("td", { class: "number" }, layer ? layer.prob(i).toFixed(2) : "-"), make("td", {}, layer ? meter(layer.prob(i), active ? "blue" : "gray") : ""));
    });
    const head = make("tr", {}, ...["layer", "decision", "probability", ""].map((t) => make("th", { scope: "col" }, t)));
    const token = make("div", { class: "inspect" }, make("h3", {}, text === null ? place(i) : `“${text}” at ${place(i)}`), make("table", { "aria-label": "What every layer decided" }, make("thead", {}, head), make("tbody", {}, ...rows)));
    const values = state.sample.array[`${state.part}.values`];
    if (values) token.append(make("p", { class: "caption" }, `input, from 0 to 255: ${Array.from({ length: sequence().channels }, (_, c) => input(i, c)).join(", ")}`));
    const next = state.sample.array["next"];
    if (next) token.append(make("p", { class: "caption" }, nextToken(i)));
    const boxes = [token];
    if (state.query !== null) {
      for (const number of shownLayers()) boxes.push(sightTable(number));
    } else {
      boxes.push(make("div", { class: "inspect hint" }, make("p", {}, `Click an activated ${info.unit}, or press Enter on it, to see which others its query can see and with what weight.`)));
    }
    find("inspector").replaceChildren(...boxes);
  }

  function nextToken(i) {
    const { array, strings } = state.sample;
    const wanted = array.wanted[i], guess = strings[array.next[i]];
    const best = `most probable next: “${guess}” (${(array.next_prob[i] / 255).toFixed(2)})`;
    return wanted === 65535 ? best : `${best}; wanted: “${strings[wanted]}” (${(array.wanted_prob[i] / 255).toFixed(2)})`;
  }

  const LISTED = 8;

  function sightTable(number) {
    const view = seen(number, state.query), name = layerName(number);
    const box = make("div", { class: "inspect" }, make("h3", {}, `${name}: what ${word(state.query) === null ? place(state.query) : `“${word(state.query)}” (position ${state.query + 1})`} looks at`));
    if (!view || !view.weights.size) {
      box.append(make("p", { class: "caption" }, caption(number, view)));
      return box;
    }
    const sorted = [...view.weights].sort((a, b) => b[1] - a[1]);
    const head = make("tr", {}, ...[info.unit, "distance", "weight", ""].map((t) => make("th", { scope: "col" }, t)));
    const rows = sorted.slice(0, LISTED).map(([i, weight]) => {
      const distance = i - state.query;
      const jump = make("button", { type: "button", class: "link" }, word(i) === null ? place(i) : `“${word(i)}” ${i + 1}`);
      jump.addEventListener("click", () => {
        move(i);
        panels[0].focus.focus({ preventScroll: true });
      });
      return make("tr", {}, make("th", { scope: "row" }, jump), make("td", { class: "number" }, distance > 0 ? `+${distance}` : String(distance)), make("td", { class: "number" }, spell(weight, "percent")), make("td", {}, meter(weight / view.most, "orange")));
    });
    box.append(make("table", { "aria-label": `Largest weights in ${name}` }, make("thead", {}, head), make("tbody", {}, ...rows)));
    const left = sorted.length - rows.length;
    const notes = [];
    if (left > 0) notes.push(`${left} more are colored`);
    if (view.shown < 0.995) notes.push(`${spell(1 - view.shown, "percent")} of the weight is on ${unshown(view)} not kept in this page`);
    if (view.sum !== null) notes.push(`weights are fractions of their sum, ${spell(view.sum)}`);
    if (notes.length) box.append(make("p", { class: "caption" }, `${notes.join("; ")}.`));
    return box;
  }

  const unshown = (view) => `${spell(view.end - view.first - view.weights.size)} others,`;

  // samples

  function facts() {
    const shown = info.samples[state.number];
    const parts = shown.facts.map(([name, value, mark]) => make("span", { class: "fact" }, make("span", { class: "name" }, name), make("b", { class: mark || "" }, value)));
    find("facts").replaceChildren(...parts);
  }

  async function open(number) {
    state.number = number;
    const sample = await load(number);
    if (state.number !== number) return;
    Object.assign(state, { sample, query: null, over: null, part: Math.min(state.part, sample.sequences.length - 1) });
    // where something happens: the first token that the first shown layer activated
    const layer = layerOf(state.layers[0]);
    state.cursor = layer && layer.positions.length ? layer.positions[0] : 0;
    find("sample").value = String(number);
    find("part-label").hidden = sample.sequences.length < 2;
    facts();
    build();
    find("explorer").dataset.ready = String(number);
  }

  info.samples.forEach((sample, number) => find("sample").append(make("option", { value: number }, sample.title)));
  ["first", "second"].forEach((name, number) => find("part").append(make("option", { value: number }, name)));
  find("explorer-about").textContent = info.about;
  find("sample").addEventListener("change", (event) => open(Number(event.target.value)));
  const turn = (by) => open((state.number + by + info.samples.length) % info.samples.length);
  find("previous").addEventListener("click", () => turn(-1));
  find("next").addEventListener("click", () => turn(1));
  find("part").addEventListener("change", (event) => {
    state.part = Number(event.target.value);
    open(state.number);
  });
  find("view-label").hidden = !["image", "wave"].includes(info.modality);
  find("view").addEventListener("change", (event) => {
    state.view = event.target.value;
    refresh();
  });
  find("both").addEventListener("change", build);
  find("back").addEventListener("click", leave);
  find("explorer").addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
  });
  if (info.layers.length < 2) {
    find("both").checked = false;
    find("both").closest("label").hidden = true;
  } else if (window.matchMedia("(max-width: 700px)").matches) find("both").checked = false;
  open(0);
})();
