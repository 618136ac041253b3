"use strict";
// Charts of the page, drawn at the available width. The numbers behind each are in the table below it.

(() => {
  const TEXT = 12;
  const tip = make("div", { class: "tip", "aria-hidden": "true", hidden: "" });
  document.body.append(tip);

  function showTip(event, lines) {
    tip.replaceChildren(...lines.map((line, i) => make("div", { class: i ? "" : "tip-head" }, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
    tip.style.left = `${Math.max(4, x)}px`;
    tip.style.top = `${Math.max(4, y)}px`;
  }

  const hideTip = () => {
    tip.hidden = true;
  };

  function canvas(holder, height) {
    const width = Math.max(220, Math.floor(holder.clientWidth));
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    svg.setAttribute("aria-label", holder.dataset.label);
    svg.addEventListener("pointerleave", hideTip);
    holder.replaceChildren(svg);
    return [svg, width];
  }

  const text = (x, y, content, anchor, name) =>
    draw("text", { x, y, "text-anchor": anchor || "start", class: name || "" }, content);

  const widest = (labels) => Math.max(...labels.map((label) => label.length)) * TEXT * 0.56;

  /** Round numbers from low to high, about `count` of them. */
  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
    return found.map((at) => Number(at.toPrecision(12)));
  }

  const short = (value, unit) =>
    unit === "percent" ? `${Number((100 * value).toPrecision(3))} %`
      : Math.abs(value) >= 10000 ? `${Number((value / 1000).toPrecision(3)).toLocaleString("en")}k`
        : String(Number(value.toPrecision(4)));

  function bars(spec, holder) {
    const series = spec.series, each = series.length > 1 ? 13 : 18, gap = 10;
    const block = series.length * each + gap, top = series.length > 1 ? 24 : 4;
    const [svg, width] = canvas(holder, top + spec.rows.length * block + 28);
    const known = series.flatMap((s) => s.values.map((v, i) => (v || 0) + ((s.errors && s.errors[i]) || 0)));
    const most = spec.most || Math.max(...known, 1e-9);
    const left = Math.min(widest(spec.rows) + 10, width * 0.4), right = width - 62;
    const x = (value) => left + ((right - left) * Math.min(value, most)) / most;
    const marks = ticks(0, most, width < 420 ? 3 : 5);
    const bottom = top + spec.rows.length * block;
    for (const at of marks) {
      svg.append(draw("line", { x1: x(at), x2: x(at), y1: top, y2: bottom - 4, class: "grid" }));
      svg.append(text(x(at), bottom + 12, short(at, spec.unit), "middle", "tick"));
    }
    if (series.length > 1) legend(svg, series, left, 12, (i) => `fill-${i}`, right);
    spec.rows.forEach((label, row) => {
      const y = top + row * block;
      svg.append(text(left - 8, y + (series.length * each) / 2 + 4, label, "end"));
      series.forEach((one, i) => {
        const value = one.values[row], error = one.errors && one.errors[row];
        const at = y + i * each;
        if (value === null) {
          svg.append(text(left + 4, at + each - 5, spec.none || "-", "start", "tick"));
          return;
        }
        svg.append(draw("rect", { x: left, y: at + 1, width: Math.max(x(value) - left, 0), height: each - 3, class: `fill-${i}` }));
        if (error) {
          const from = x(Math.max(0, value - error)), to = x(value + error), middle = at + each / 2;
          svg.append(draw("path", { d: `M${from},${middle}H${to}M${from},${middle - 4}v8M${to},${middle - 4}v8`, class: "whisker" }));
        }
        svg.append(text(width - 4, at + each - 5, spell(value, spec.unit), "end", "value"));
      });
      const lines = series.map((s) => `${series.length > 1 ? `${s.name}: ` : ""}${spell(s.values[row], spec.unit)}${s.errors && s.errors[row] ? ` ± ${spell(s.errors[row], spec.unit)}` : ""}`);
      hover(svg, 0, y - gap / 2, width, block, () => [label, ...lines]);
    });
    svg.append(draw("line", { x1: left, x2: left, y1: top, y2: bottom - 4, class: "axis" }));
  }

  function hover(svg, x, y, width, height, lines) {
    const area = draw("rect", { x, y, width: Math.max(width, 1), height, class: "touch" });
    const show = (event) => showTip(event, lines(event));
    area.addEventListener("pointermove", show);
    area.addEventListener("pointerdown", show);
    area.addEventListener("pointerleave", hideTip);
    svg.append(area);
  }

  function legend(svg, series, left, y, name, right) {
    let x = left;
    series.forEach((one, i) => {
      const room = one.name.length * TEXT * 0.56 + 34;
      if (x + room > right + 60 && x > left) return;
      svg.append(draw("rect", { x, y: y - 9, width: 12, height: 10, class: name(i) }));
      svg.append(text(x + 17, y, one.name, "start", "tick"));
      x += room;
    });
  }

  function rows(spec, holder) {
    const tall = 40, gap = 12, bottom = spec.rows.length * (tall + gap) + 4;
    const [svg, width] = canvas(holder, bottom + 34);
    const left = Math.min(widest(spec.rows) + 10, width * 0.3), right = width - 8;
    const everything = Math.max(...spec.values.flat().map((v) => v || 0), 1e-9);
    spec.rows.forEach((label, row) => {
      const y = row * (tall + gap) + 4, values = spec.values[row];
      const most = spec.most || (spec.own ? Math.max(...values.map((v) => v || 0), 1e-9) : everything);
      const step = (right - left) / values.length;
      svg.append(draw("rect", { x: left, y, width: right - left, height: tall, class: "paper" }));
      values.forEach((value, i) => {
        const height = ((value || 0) / most) * tall;
        const bar = (part, name) => {
          if (part > 0) svg.append(draw("rect", { x: left + i * step, y: y + tall - part, width: Math.max(step - (step > 6 ? 1 : 0), 0.5), height: part, class: name }));
        };
        bar(height, spec.active ? "fill-none" : "fill-0");
        if (spec.active) bar((spec.active[row][i] / most) * tall, "fill-0");
      });
      svg.append(text(left - 8, y + tall / 2 + 4, label, "end"));
      hover(svg, left, y, right - left, tall, (event) => {
        const box = svg.getBoundingClientRect();
        const place = (event.clientX - box.left) * (width / box.width) - left;
        const i = Math.min(values.length - 1, Math.max(0, Math.floor(place / step)));
        return [label, `${spec.bins[i]}: ${spell(values[i], spec.unit)}`];
      });
    });
    const [low, high] = spec.range;
    for (const at of ticks(low, high, width < 420 ? 4 : 8)) {
      const x = left + ((right - left) * (at - low)) / (high - low || 1);
      svg.append(draw("line", { x1: x, x2: x, y1: bottom - gap + 2, y2: bottom - gap + 7, class: "axis" }));
      svg.append(text(x, bottom + 8, short(at), x > right - 12 ? "end" : "middle", "tick"));
    }
    const full = spec.own ? "each row has its own scale" : `full height ${spell(spec.most || everything, spec.unit)}`;
    svg.append(text((left + right) / 2, bottom + 26, `${spec.xlabel} (${full})`, "middle", "tick"));
  }

  function matrix(spec, holder) {
    const tall = 26, top = 24;
    const [svg, width] = canvas(holder, top + spec.rows.length * tall + 6);
    const left = Math.min(widest(spec.rows) + 12, width * 0.36), step = (width - left - 2) / spec.columns.length;
    const tight = step < widest(spec.columns) + 4;
    spec.columns.forEach((label, i) => {
      svg.append(text(left + (i + 0.5) * step, 15, tight ? String(i + 1) : label, "middle", "tick"));
    });
    spec.rows.forEach((label, row) => {
      const y = top + row * tall;
      svg.append(text(left - 8, y + tall / 2 + 4, label, "end"));
      spec.values[row].forEach((value, i) => {
        const color = value ? shade(CONFIDENCE, value) : [255, 255, 255];
        const cell = draw("rect", { x: left + i * step, y, width: step - 2, height: tall - 2, class: value === null ? "absent" : "cell" });
        if (value !== null) cell.setAttribute("fill", css(color));
        svg.append(cell);
        if (value !== null && step > 30) {
          const number = text(left + (i + 0.5) * step - 1, y + tall / 2 + 4, spec.texts ? spec.texts[row][i] : `${Math.round(100 * value)}`, "middle", "on-cell");
          number.setAttribute("fill", isDark(color) ? "#fff" : "#111");
          svg.append(number);
        }
        hover(svg, left + i * step, y, step, tall, () => [`${label}, ${spec.columns[i]}`, spec.texts ? `${spec.texts[row][i]} (${spell(value, spec.unit)})` : spell(value, spec.unit)]);
      });
    });
  }

  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

  /** Color and dashes of a line; a smoothed one has the color of the faint one before it. */
  const stroke = (one, i) => ({
    class: `line stroke-${(one.smooth ? i - 1 : i) % 6} ${one.faint ? "faint" : ""}`,
    "stroke-dasharray": DASHES[Math.floor(i / 6) % 4] || (one.faint || one.smooth ? "" : DASHES[i % 4]),
  });

  function lines(spec, holder) {
    // a loss that was no number has no place
    const known = spec.series.map((one) => ({ ...one, points: one.points.filter((p) => p[1] !== null) }));
    const series = known.filter((one) => one.points.length);
    const [svg, width] = canvas(holder, 250);
    if (!series.length) return;
    const points = series.flatMap((one) => one.points);
    const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
    const x0 = Math.min(...xs, 0), x1 = Math.max(...xs, x0 + 1);
    let y0 = spec.least ?? Math.min(...ys), y1 = spec.most ?? Math.max(...ys);
    if (y1 - y0 < 1e-9) [y0, y1] = [y0 - Math.abs(y0 || 1) / 2, y1 + Math.abs(y1 || 1) / 2];
    if (spec.least === undefined || spec.least === null) y0 -= (y1 - y0) * 0.05;
    const marks = ticks(y0, y1, 5);
    const top = 10 + 18 * legendRows(series, width), bottom = 212;
    const left = Math.max(30, widest(marks.map((m) => short(m, spec.unit))) + 10), right = width - 10;
    const x = (v) => left + ((right - left) * (v - x0)) / (x1 - x0);
    const y = (v) => bottom - ((bottom - top) * (v - y0)) / (y1 - y0);
    for (const at of marks) {
      svg.append(draw("line", { x1: left, x2: right, y1: y(at), y2: y(at), class: "grid" }));
      svg.append(text(left - 6, y(at) + 4, short(at, spec.unit), "end", "tick"));
    }
    for (const at of ticks(x0, x1, width < 420 ? 4 : 7)) {
      svg.append(draw("line", { x1: x(at), x2: x(at), y1: bottom, y2: bottom + 4, class: "axis" }));
      svg.append(text(x(at), bottom + 17, short(at), x(at) > right - 14 ? "end" : "middle", "tick"));
    }
    svg.append(draw("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
    svg.append(text((left + right) / 2, 246, spec.xlabel, "middle", "tick"));
    series.forEach((one, i) => {
      const d = one.points.map((p, k) => `${k ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
      svg.append(draw("path", { d, ...stroke(one, i) }));
      if (one.points.length <= 30 && !one.faint && !one.smooth) {
        for (const p of one.points) svg.append(draw("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, class: `fill-${i % 6}` }));
      }
    });
    lineLegend(svg, series, width);
    const cross = draw("line", { y1: top, y2: bottom, class: "cross", visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("pointerleave", () => cross.setAttribute("visibility", "hidden"));
    hover(svg, left, top, right - left, bottom - top, (event) => {
      const box = svg.getBoundingClientRect();
      const at = x0 + (((event.clientX - box.left) * (width / box.width) - left) / (right - left)) * (x1 - x0);
      const near = series.map((one) => one.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)));
      const nearest = near.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))[0];
      cross.setAttribute("x1", x(nearest));
      cross.setAttribute("x2", x(nearest));
      cross.setAttribute("visibility", "visible");
      return [`${spec.xlabel} ${spell(nearest)}`, ...series.map((one, i) => `${one.name}: ${spell(near[i][1], spec.unit)}${near[i][0] === nearest ? "" : ` (at ${spell(near[i][0])})`}`)];
    });
  }

  function places(series, width) {
    let x = 8, row = 0;
    return series.map((one) => {
      const room = 30 + one.name.length * TEXT * 0.56 + 12;
      if (x + room > width && x > 8) [x, row] = [8, row + 1];
      const place = [x, row];
      x += room;
      return place;
    });
  }

  const legendRows = (series, width) => 1 + Math.max(...places(series, width).map((p) => p[1]));

  function lineLegend(svg, series, width) {
    places(series, width).forEach(([x, row], i) => {
      const y = 11 + row * 18;
      svg.append(draw("path", { d: `M${x},${y - 4}h22`, ...stroke(series[i], i) }));
      svg.append(text(x + 27, y, series[i].name, "start", "tick"));
    });
  }

  const kinds = { bars, rows, matrix, lines };

  for (const holder of document.querySelectorAll("[data-chart]")) {
    const spec = numbers.charts[holder.dataset.chart];
    let width = 0;
    new ResizeObserver(() => {
      if (holder.clientWidth !== width) {
        width = holder.clientWidth;
        kinds[spec.type](spec, holder);
      }
    }).observe(holder);
  }
})();
