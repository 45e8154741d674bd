"use strict";

const PER_PAGE = 12, AT_AN_END = 4;

// Prompts, responses and rewards: of the first and last steps beside each other, then all, to search in.
class Samples {
  constructor(runs) {
    this.runs = runs;
    this.all = runs.flatMap((run, number) => run.samples.map((sample) => ({ ...sample, run: number })));
    this.page = 0;
    const logged = runs.reduce((sum, run) => sum + run.logged_bytes, 0), more = runs.some((run) => run.left_out);
    if (!this.all.length) {
      this.node = section("samples", "Samples", element("p", { class: "soft" }, "No sample is recorded."));
      return;
    }
    this.list = element("div", { class: "list" });
    this.count = element("span", { class: "soft", role: "status" });
    this.back = element("button", { type: "button", onclick: () => this.turn(-1) }, "previous");
    this.on = element("button", { type: "button", onclick: () => this.turn(1) }, "next");
    const less = more ? " The report has room for " + this.all.length.toLocaleString("en") + " of the samples that were logged (" + written(logged, "bytes") + "): those of the first and last steps, and of some in between." : "";
    this.node = section("samples", "Samples", element("h3", {}, "Before and after"), runs.map((run, number) => this.ends(run, number)),
      element("h3", {}, "All samples"), element("p", { class: "soft" }, "Rewards are all reward functions, weighted and added." + less),
      this.filters(), element("div", { class: "pages" }, this.back, this.on, this.count), this.list);
    this.draw();
  }

  ends(run, number) {
    if (!run.samples.length) return [];
    const steps = [...new Set(run.samples.map((sample) => sample.step))];
    const of = (step) => run.samples.filter((sample) => sample.step === step).slice(0, AT_AN_END).map((sample) => this.card({ ...sample, run: number }));
    const column = (title, step) => element("div", { class: "end" }, element("h3", {}, title + " step " + step.toLocaleString("en"), element("span", { class: "soft" }, this.runs.length > 1 ? " of " + run.name : "")), of(step));
    const first = steps[0], last = steps[steps.length - 1];
    return element("div", { class: "two" }, column("First logged:", first), first === last ? [] : column("Last logged:", last));
  }

  filters() {
    const changed = () => { this.page = 0; this.draw(); };
    const steps = this.all.map((sample) => sample.step);
    this.words = element("input", { type: "search", placeholder: "text in prompt or response", "aria-label": "Text", oninput: changed });
    this.from = element("input", { type: "number", placeholder: String(steps.reduce((a, b) => Math.min(a, b))), "aria-label": "From step", oninput: changed });
    this.to = element("input", { type: "number", placeholder: String(steps.reduce((a, b) => Math.max(a, b))), "aria-label": "To step", oninput: changed });
    this.order = element("select", { "aria-label": "Order", onchange: changed },
      [["step", "by step"], ["-step", "by step, last first"], ["-reward", "best reward first"], ["reward", "worst reward first"], ["-tokens", "longest first"]]
        .map(([value, text]) => element("option", { value }, text)));
    this.which = element("select", { "aria-label": "Which", onchange: changed },
      [["all", "all"], ["whole", "finished"], ["cut", "cut off at the limit"], ["failed", "reward or environment failed"], ["training", "of training"], ["validation", "of validation"]].map(([value, text]) => element("option", { value }, text)));
    this.run = element("select", { "aria-label": "Run", onchange: changed }, element("option", { value: "" }, "all runs"), this.runs.map((run, number) => element("option", { value: String(number) }, run.name)));
    return element("div", { class: "filters" }, this.words, element("label", {}, "steps", this.from, "to", this.to), this.which, this.order, this.runs.length > 1 ? this.run : []);
  }

  chosen() {
    const words = this.words.value.toLowerCase(), from = this.from.value === "" ? -Infinity : +this.from.value, to = this.to.value === "" ? Infinity : +this.to.value;
    const fits = { all: () => true, whole: (one) => one.finished, cut: (one) => !one.finished, failed: (one) => one.errors, training: (one) => one.validation === undefined, validation: (one) => one.validation !== undefined }[this.which.value];
    const found = this.all.filter((one) => one.step >= from && one.step <= to && fits(one) && (this.run.value === "" || one.run === +this.run.value) &&
      (!words || (one.prompt + "\n" + one.response + "\n" + one.id).toLowerCase().includes(words)));
    const by = this.order.value.replace("-", ""), sign = this.order.value.startsWith("-") ? -1 : 1;
    const value = (one) => (one[by] === null ? Infinity * sign : one[by]);
    return found.sort((one, other) => (value(one) === value(other) ? 0 : sign * (value(one) < value(other) ? -1 : 1)));
  }

  turn(pages) {
    this.page += pages;
    this.draw();
  }

  draw() {
    const found = this.chosen(), pages = Math.max(Math.ceil(found.length / PER_PAGE), 1);
    this.back.disabled = this.page === 0;
    this.on.disabled = this.page >= pages - 1;
    this.count.textContent = found.length.toLocaleString("en") + " samples, page " + (this.page + 1) + " of " + pages;
    this.list.replaceChildren(...found.slice(this.page * PER_PAGE, (this.page + 1) * PER_PAGE).map((sample) => this.card(sample)));
  }

  card(sample) {
    const run = this.runs[sample.run];
    const tokens = sample.tokens === null ? "" : sample.tokens.toLocaleString("en") + (sample.tokens === 1 ? " token" : " tokens");
    const pictures = (sample.images || []).map((name) => (Object.hasOwn(run.pictures, name) ? element("img", { src: run.pictures[name], alt: name }) : element("span", { class: "soft" }, "[" + name + "] ")));
    return element("article", { class: "card sample" },
      element("header", {}, this.runs.length > 1 ? element("span", { class: "run" }, key(sample.run), run.name) : [],
        element("span", {}, "step " + sample.step.toLocaleString("en")), sample.validation === undefined ? [] : element("span", { class: "validation" }, "validation " + sample.validation), element("b", {}, "reward " + (sample.reward === null ? "none" : written(sample.reward))),
        [tokens, sample.turns === undefined ? "" : sample.turns + " turns", sample.id].filter(Boolean).map((text) => element("span", {}, text)),
        sample.finished ? [] : element("span", { class: "warn" }, "cut off at the limit")),
      pictures, element("div", { class: "text prompt" }, sample.prompt), element("div", { class: "text response" }, sample.response === "" ? "(empty)" : sample.response),
      Object.entries(sample.errors || {}).map(([name, text]) => element("div", { class: "text error" }, name + ": " + text)));
  }
}
