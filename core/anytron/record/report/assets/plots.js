"use strict";

// The plots of all metrics, and what is set for all of them together.
class Plots {
  constructor(content) {
    const { runs } = content;
    this.view = { from: null, to: null, smoothing: 0, logarithmic: false, shown: new Set(runs.keys()), names: runs.map((run) => run.name) };
    this.content = content;
    const marks = runs.flatMap((run, number) => [
      ...run.resumes.map((one) => ({ run: number, step: one.step, text: run.name + ": resumed after step " + one.step })),
      ...run.losses.filter((one) => +one.after_step > 0).map((one) => ({ run: number, step: +one.after_step, text: run.name + ": " + one.lost })),
    ]);
    this.charts = [];
    const made = (name) => {
      const lines = runs.flatMap((run, number) => (Object.hasOwn(run.series, name) ? [{ run: number, steps: run.series[name][0], values: run.series[name][1], low: run.series[name + "/low"], high: run.series[name + "/high"] }] : []));
      const chart = new Chart(name, Object.hasOwn(content.metrics, name) ? content.metrics[name] : {}, lines, marks, this.view, (from, to) => this.zoom(from, to));
      this.charts.push(chart);
      return chart.node;
    };
    const rest = content.chapters.map((chapter) => ({ title: chapter.title, metrics: chapter.metrics.filter((name) => !content.leading.includes(name)) }));
    this.groups = [
      element("div", { class: "grid" }, content.leading.map(made)),
      ...rest.filter((chapter) => chapter.metrics.length).map((chapter) =>
        element("div", {}, element("h3", {}, chapter.title), element("div", { class: "grid" }, chapter.metrics.map(made)))),
    ];
    const thinned = runs.flatMap((run) => (run.section > 1 ? ["of every " + run.section.toLocaleString("en") + " steps" + (runs.length > 1 ? " of " + run.name : "")] : []));
    const note = thinned.length ? element("p", { class: "soft" }, "Lines are thinned: " + thinned.join(", ") + " they have the lowest, the highest and the first that is not finite.") : [];
    this.node = section("plots", "Plots", this.bar(), note, this.charts.length ? this.groups : element("p", { class: "soft" }, "No step is recorded yet."));
    let pending = 0;
    const redraw = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => this.draw()); };
    window.addEventListener("resize", redraw);
    window.addEventListener("beforeprint", () => this.draw());
  }

  bar() {
    const runs = this.content.runs.map((run, number) => {
      const button = element("button", { type: "button", class: "run", "aria-pressed": "true", title: "Show or hide this run", onclick: () => {
        if (!this.view.shown.delete(number)) this.view.shown.add(number);
        button.setAttribute("aria-pressed", String(this.view.shown.has(number)));
        this.draw();
      } }, key(number), run.name);
      return button;
    });
    const value = element("output", {}, "0");
    const smoothing = element("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing", oninput: () => {
      this.view.smoothing = +smoothing.value;
      value.textContent = smoothing.value;
      this.draw();
    } });
    const logarithmic = element("input", { type: "checkbox", onchange: () => { this.view.logarithmic = logarithmic.checked; this.draw(); } });
    const wanted = element("input", { type: "search", placeholder: "metrics ...", "aria-label": "Show metrics whose name has", oninput: () => this.filter(wanted.value) });
    this.whole = element("button", { type: "button", disabled: true, onclick: () => this.zoom(null, null) }, "all steps");
    return element("div", { class: "bar" }, runs.length > 1 ? runs : [], element("label", {}, "smoothing", smoothing, value),
      element("label", {}, logarithmic, "logarithmic"), this.whole, wanted);
  }

  zoom(from, to) {
    Object.assign(this.view, { from, to });
    this.whole.disabled = from === null;
    this.draw();
  }

  filter(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const chart of this.charts) chart.node.hidden = !words.every((word) => chart.name.toLowerCase().includes(word));
    for (const group of this.groups) group.hidden = ![...group.querySelectorAll("figure")].some((one) => !one.hidden);
    this.draw();
  }

  draw() {
    for (const chart of this.charts) if (!chart.node.hidden) chart.draw();
  }
}
