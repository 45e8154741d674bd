"use strict";

(function () {
  const content = JSON.parse(document.getElementById("content").textContent), root = document.documentElement;
  const modes = ["", "light", "dark"], names = { "": "colours of the system", light: "light", dark: "dark" };
  const theme = element("button", { type: "button", title: "Change the colours", onclick: () => {
    const next = modes[(modes.indexOf(root.dataset.theme || "") + 1) % modes.length];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    theme.textContent = names[next];
  } }, names[""]);
  const plots = new Plots(content);
  const parts = [summary(content), plots.node, timeSplit(content.runs), new Samples(content.runs).node, configuration(content), platform(content.runs), events(content.runs)];
  document.getElementById("report").append(
    element("h1", {}, content.runs.map((run) => run.name).join(", ")),
    element("p", { class: "soft" }, "A report of Anytron, made " + content.made + (content.runs.some((run) => run.going) ? ", while training goes on" : "")),
    element("nav", { "aria-label": "Parts" }, parts.map((part) => element("a", { href: "#" + part.id }, part.querySelector("h2").textContent)), theme), ...parts);
  plots.draw();
  root.dataset.ready = "true";
})();
