"use strict";

// A plot of one metric over steps: a line for each run, with values under the pointer; dragging shows a part of the steps.
const HEIGHT = 190, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 22;

class Chart {
  // view: {from, to, smoothing, logarithmic, shown: Set of runs' numbers}; zoom(from, to) is told of a drag.
  constructor(name, about, lines, marks, view, zoom) {
    Object.assign(this, { name, about, lines, marks, view, zoom });
    this.logarithmic = false;
    this.svg = drawn("svg", { role: "img", tabindex: "0", "aria-label": name + " over training steps" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.button = element("button", { type: "button", title: "Logarithmic axis", "aria-pressed": "false", onclick: () => {
      this.logarithmic = !this.logarithmic;
      this.draw();
    } }, "log");
    this.node = element("figure", { "data-metric": name },
      element("figcaption", {}, element("b", {}, name), element("span", { class: "soft" }, about.unit || ""), this.button),
      this.svg, this.tip, element("p", {}, about.meaning || ""));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") this.dragged = this.place(event); });
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.leave());
    this.svg.addEventListener("dblclick", () => this.zoom(null, null));
    this.svg.addEventListener("keydown", (event) => this.walk(event));
    this.svg.addEventListener("blur", () => this.leave());
  }

  // The part of the steps that is shown, of the runs that are shown, smoothed.
  select() {
    return this.lines.filter((line) => this.view.shown.has(line.run)).map((line) => {
      const smooth = smoothed(line.values, this.view.smoothing);
      const begin = Math.max(lower(line.steps, this.view.from ?? -Infinity) - 1, 0);
      const end = Math.min(lower(line.steps, (this.view.to ?? Infinity) + 1e-9) + 1, line.steps.length);
      return { run: line.run, low: line.low, high: line.high, steps: line.steps.slice(begin, end), raw: line.values.slice(begin, end), smooth: smooth.slice(begin, end) };
    });
  }

  draw() {
    this.leave();
    const width = this.width = Math.max(this.svg.clientWidth || 340, 120);
    this.svg.setAttribute("viewBox", "0 0 " + width + " " + HEIGHT);
    this.svg.replaceChildren();
    const chosen = this.chosen = this.select();
    const logarithmic = this.logarithmic || this.view.logarithmic;
    this.button.setAttribute("aria-pressed", String(logarithmic));
    const counts = (value) => typeof value === "number" && (!logarithmic || value > 0);
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const line of chosen) {
      for (let place = 0; place < line.steps.length; place++) {
        const step = line.steps[place];
        if (step < (this.view.from ?? -Infinity) || step > (this.view.to ?? Infinity)) continue;
        first = Math.min(first, step);
        last = Math.max(last, step);
        for (const value of [line.smooth[place], this.view.smoothing ? null : line.raw[place]]) {
          if (counts(value)) { low = Math.min(low, value); high = Math.max(high, value); }
        }
      }
    }
    for (const line of chosen) {
      for (const [steps, values] of [line.low, line.high].filter(Boolean)) {
        steps.forEach((step, place) => {
          if (step >= first && step <= last && counts(values[place])) { low = Math.min(low, values[place]); high = Math.max(high, values[place]); }
        });
      }
    }
    first = this.view.from ?? first;
    last = this.view.to ?? last;
    if (first > last || first === Infinity) { this.empty("no step here"); return; }
    if (low > high) { this.empty(logarithmic ? "no number above 0" : "no finite number"); low = 0; high = 1; }
    if (logarithmic) { low = Math.log10(low); high = Math.log10(high); }
    if (high - low < 1e-12 * Math.max(Math.abs(low), Math.abs(high), 1e-300)) {
      const half = logarithmic ? 0.5 : Math.abs(low) * 0.1 || 0.5;
      low -= half;
      high += half;
    }
    const room = (high - low) * 0.05;
    low -= room;
    high += room;
    const across = (step) => LEFT + (last === first ? 0.5 : (step - first) / (last - first)) * (width - LEFT - RIGHT);
    const up = (value) => HEIGHT - BOTTOM - ((logarithmic ? Math.log10(value) : value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    Object.assign(this, { across, up, counts, first, last });
    this.axes(low, high, logarithmic);
    for (const mark of this.marks) {
      if (!this.view.shown.has(mark.run) || mark.step < first || mark.step > last) continue;
      const line = drawn("line", { class: "mark", x1: across(mark.step), x2: across(mark.step), y1: TOP, y2: HEIGHT - BOTTOM });
      line.style.stroke = colour(mark.run);
      line.append(drawn("title", {}, mark.text));
      this.svg.append(line);
    }
    const clip = "clip-" + this.name.replace(/[^a-z0-9]/gi, "-") + "-" + (Chart.count = (Chart.count || 0) + 1);
    const frame = drawn("clipPath", { id: clip });
    frame.append(drawn("rect", { x: LEFT - 2, y: 0, width: Math.max(width - LEFT - RIGHT + 4, 0), height: HEIGHT }));
    const lines = drawn("g", { "clip-path": "url(#" + clip + ")" });
    this.svg.append(frame, lines);
    for (const line of chosen) {
      if (line.low && line.high) this.band(lines, line);
      if (this.view.smoothing) this.line(lines, line, line.raw, "raw");
      this.line(lines, line, line.smooth, "smooth");
      line.raw.forEach((value, place) => {
        if (typeof value === "number") return;
        const mark = drawn("text", { x: across(line.steps[place]), y: TOP + 8, "text-anchor": "middle", class: "odd" }, "\u00d7");
        mark.style.fill = colour(line.run);
        mark.append(drawn("title", {}, value + " at step " + line.steps[place]));
        lines.append(mark);
      });
    }
    this.cross = drawn("g", {});
    this.svg.append(this.cross);
  }

  empty(why) {
    this.svg.append(drawn("text", { x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, why));
  }

  axes(low, high, logarithmic) {
    const edge = HEIGHT - BOTTOM;
    for (const value of logarithmic ? decades(low, high) : ticks(low, high, 4)) {
      const y = this.up(value);
      this.svg.append(drawn("line", { class: "rule", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      this.svg.append(drawn("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, written(value, this.about.unit)));
    }
    for (const step of ticks(this.first, this.last, Math.max(Math.floor(this.width / 80), 2)).filter(Number.isInteger)) {
      this.svg.append(drawn("text", { x: this.across(step), y: edge + 16, "text-anchor": "middle" }, step.toLocaleString("en")));
    }
  }

  line(into, line, values, kind) {
    let path = "", open = false;
    values.forEach((value, place) => {
      if (!this.counts(value)) { open = false; return; }
      const x = this.across(line.steps[place]).toFixed(1), y = this.up(value).toFixed(1);
      const alone = !open && !this.counts(values[place + 1]);
      path += (open ? "L" : "M") + x + " " + y + (alone ? "h.01" : "");
      open = true;
    });
    if (!path) return;
    const made = drawn("path", { d: path, class: kind, "stroke-linecap": "round", "stroke-dasharray": dashes(line.run) });
    made.style.stroke = colour(line.run);
    into.append(made);
  }

  // The confidence interval of each value.
  band(into, line) {
    const ends = ([steps, values]) => steps.flatMap((step, place) => (this.counts(values[place]) ? [this.across(step).toFixed(1) + " " + this.up(values[place]).toFixed(1)] : []));
    const corners = [...ends(line.high), ...ends(line.low).reverse()];
    if (corners.length < 3) return;
    const made = drawn("path", { d: "M" + corners.join("L") + "Z", class: "band" });
    made.style.fill = colour(line.run);
    into.append(made);
  }

  place(event) {
    return (event.clientX - this.svg.getBoundingClientRect().left) / this.svg.clientWidth * this.width;
  }

  stepAt(place) {
    const part = (place - LEFT) / (this.width - LEFT - RIGHT);
    return this.first + Math.min(Math.max(part, 0), 1) * (this.last - this.first);
  }

  point(event) {
    if (!this.across) return;
    const place = this.place(event);
    this.show(this.stepAt(place));
    if (this.dragged !== undefined) {
      this.cross.append(drawn("rect", { class: "zoom", x: Math.min(place, this.dragged), y: TOP, width: Math.abs(place - this.dragged), height: HEIGHT - TOP - BOTTOM }));
    }
  }

  release(event) {
    const from = this.dragged;
    this.dragged = undefined;
    if (from === undefined || !this.across || Math.abs(this.place(event) - from) < 8) return;
    const steps = [this.stepAt(from), this.stepAt(this.place(event))].sort((one, other) => one - other);
    if (steps[1] - steps[0] >= 1) this.zoom(Math.floor(steps[0]), Math.ceil(steps[1]));
  }

  walk(event) {
    if (!this.across || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const wide = Math.max(1, Math.round((this.last - this.first) / 100));
    const from = this.at ?? (event.key === "ArrowRight" ? this.first - wide : this.last + wide);
    this.show(Math.min(Math.max(from + (event.key === "ArrowRight" ? wide : -wide), this.first), this.last));
  }

  show(step) {
    const found = this.chosen.filter((line) => line.steps.length).map((line) => ({ line, place: nearest(line.steps, step) }));
    if (!found.length) return;
    const near = found.reduce((one, other) => Math.abs(one.line.steps[one.place] - step) <= Math.abs(other.line.steps[other.place] - step) ? one : other);
    this.at = near.line.steps[near.place];
    const x = this.across(this.at);
    this.cross.replaceChildren(drawn("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    const rows = [element("b", {}, "step " + this.at.toLocaleString("en"))];
    for (const { line, place } of found) {
      const raw = line.raw[place], smooth = line.smooth[place];
      if (this.counts(smooth)) {
        const dot = drawn("circle", { cx: this.across(line.steps[place]), cy: this.up(smooth), r: 3 });
        dot.style.fill = colour(line.run);
        this.cross.append(dot);
      }
      const elsewhere = line.steps[place] === this.at ? "" : " at " + line.steps[place].toLocaleString("en");
      const average = this.view.smoothing && this.counts(smooth) ? " (smoothed " + written(smooth, this.about.unit) + ")" : "";
      rows.push(element("div", {}, key(line.run), written(raw, this.about.unit) + average + elsewhere, " ", element("span", { class: "soft" }, this.view.names.length > 1 ? this.view.names[line.run] : "")));
    }
    this.tip.replaceChildren(...rows);
    this.tip.hidden = false;
    const plot = this.svg.getBoundingClientRect(), own = this.node.getBoundingClientRect();
    const left = plot.left - own.left + x / this.width * plot.width;
    const beyond = left + 14 + this.tip.offsetWidth > this.node.clientWidth;
    this.tip.style.left = Math.max(4, beyond ? left - 14 - this.tip.offsetWidth : left + 14) + "px";
    this.tip.style.top = plot.top - own.top + 12 + "px";
  }

  leave() {
    this.tip.hidden = true;
    this.at = this.dragged = undefined;
    if (this.cross) this.cross.replaceChildren();
  }
}

function lower(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(sorted, value) {
  const place = lower(sorted, value);
  if (place === 0) return 0;
  if (place === sorted.length) return place - 1;
  return value - sorted[place - 1] <= sorted[place] - value ? place - 1 : place;
}

// An exponential average, corrected for its start; numbers that are not finite are passed over.
function smoothed(values, weight) {
  if (!weight) return values;
  let average = 0, sum = 0;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    average = weight * average + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return average / sum;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
  const found = [];
  for (let number = Math.ceil(low / step); number * step <= high; number++) found.push(+(number * step).toPrecision(12));
  return found;
}

function decades(low, high) {
  const wide = Math.max(1, Math.ceil((high - low) / 5)), found = [];
  for (let power = Math.ceil(low); power <= high; power += wide) found.push(10 ** power);
  return found.length > 1 ? found : [10 ** low, 10 ** ((low + high) / 2), 10 ** high].map((one) => +one.toPrecision(3));
}
