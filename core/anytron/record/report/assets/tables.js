"use strict";

function summary(content) {
  const tone = { finished: "good", failed: "bad", "going on": "warn" };
  return section("summary", "Summary", element("div", { class: "grid" }, content.runs.map((run, number) => element("div", { class: "card" },
    element("h3", { class: "run" }, key(number), run.name), element("p", { class: tone[run.state] || "soft" }, run.state),
    run.failure ? element("div", { class: "text error" }, run.failure) : [], facts(run.facts),
    run.resumes.length ? element("p", { class: "soft" }, "resumed " + run.resumes.length + (run.resumes.length === 1 ? " time" : " times")) : [],
    run.losses.length ? element("p", { class: "bad" }, run.losses.length + (run.losses.length === 1 ? " process was" : " processes were") + " lost") : [],
    run.problems.map((problem) => element("p", { class: "warn" }, problem)), element("p", { class: "soft" }, run.path)))));
}

function timeSplit(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.parts)))].filter((name) => name !== "other").concat("other");
  const shade = (name) => (name === "other" ? "var(--line)" : colour(names.indexOf(name)));
  const rows = runs.filter((run) => run.steps).map((run) => {
    const parts = names.filter((name) => run.parts[name] > 0), whole = parts.reduce((sum, name) => sum + run.parts[name], 0);
    return element("div", {}, element("h3", {}, runs.length > 1 ? run.name : "A step, on average"),
      element("div", { class: "split", role: "img", "aria-label": "Where the time of a step goes" }, parts.map((name) => {
        const part = element("span", { title: name });
        part.style.flexGrow = String(run.parts[name] / whole);
        part.style.background = shade(name);
        return part;
      })),
      element("div", { class: "splits" }, parts.map((name) => {
        const box = element("span", { class: "box" });
        box.style.background = shade(name);
        return element("span", {}, box, name + " " + written(run.parts[name] / run.steps) + " s, " + (100 * run.parts[name] / whole).toFixed(1) + " %");
      })));
  });
  return section("time", "Where the time goes", rows.length ? rows : element("p", { class: "soft" }, "No step is recorded yet."));
}

function configuration(content) {
  const { runs, settings } = content, several = runs.length > 1;
  const differs = ([, values]) => values.some((value) => value !== values[0]);
  const only = element("input", { type: "checkbox", checked: several });
  const wanted = element("input", { type: "search", placeholder: "keys or values ...", "aria-label": "Key or value" });
  const place = element("div", {});
  const draw = () => {
    const words = wanted.value.toLowerCase();
    const rows = settings.filter((row) => (!several || !only.checked || differs(row)) && (row[0] + " " + row[1].join(" ")).toLowerCase().includes(words));
    const cells = ([name, values]) => [name, ...values.map((value) => element("td", { class: several && differs([name, values]) ? "differs" : "" }, value === null ? "-" : value))];
    place.replaceChildren(rows.length ? table(["key", ...runs.map((run) => run.name)], rows.map(cells)) : element("p", { class: "soft" }, several && only.checked && !words ? "The configurations are the same." : "No key fits."));
  };
  only.addEventListener("change", draw);
  wanted.addEventListener("input", draw);
  draw();
  return section("configuration", "Configuration", element("div", { class: "filters" }, several ? element("label", {}, only, "only what differs") : [], wanted), place);
}

function platform(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.versions)))];
  const versions = names.length ? table(["version of", ...runs.map((run) => run.name)], names.map((name) => [name, ...runs.map((run) => run.versions[name] || "-")])) : [];
  return section("platform", "Platform, versions and patches", versions, runs.map((run) => run.workers.map((worker) => element("div", {},
    element("h3", {}, (runs.length > 1 ? run.name + ": " : "") + worker.role + ", " + worker.ranks), facts(worker.facts),
    worker.patches.length ? element("details", {}, element("summary", {}, worker.patches.length + " patches of third-party code"),
      table(["patch", "outcome", "of what", "why", "detail"], worker.patches.map((patch) => [patch.id, patch.outcome, patch.target, patch.reason, patch.detail]))) : []))));
}

function events(runs) {
  const several = runs.length > 1;
  const shown = runs.map((run) => {
    const losses = run.losses.map((one) => [one.time || "", "lost after step " + one.after_step, one.lost + " " + (one.why || ""), one.then || ""]);
    const resumes = run.resumes.map((one) => ["", "resumed after step " + one.step, one.changes.map(([name, old, now]) => name + ": " + old + " -> " + now).join("\n") || "nothing was changed", ""]);
    const rows = [...resumes, ...losses];
    if (!rows.length && !run.log.length && !run.failure) return [];
    return element("div", {}, several ? element("h3", {}, run.name) : [], rows.length ? table(["when", "what", "why", "then"], rows) : [],
      run.failure ? element("div", { class: "text error" }, run.failure) : [],
      run.log.length ? element("details", { open: run.log.length < 20 }, element("summary", {}, "log of the driver, " + run.log.length + " lines"), element("div", { class: "text" }, run.log.join("\n"))) : []);
  });
  const nothing = shown.every((one) => Array.isArray(one));
  return section("events", "Restarts, failures and warnings", nothing ? element("p", { class: "soft" }, "No warning, no restart, no failure is recorded.") : shown);
}
