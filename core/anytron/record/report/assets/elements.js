"use strict";

// Everything that is shown becomes text of a node, never markup.
function visible(text) {
  return String(text)
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (one) => String.fromCharCode(0x2400 + one.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421")
    .replace(/[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (one) => escaped(one.charCodeAt(0)))
    .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, (one) => escaped(one.charCodeAt(0)));
}

function escaped(code) {
  return "\\u" + code.toString(16).padStart(4, "0");
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).map((child) => (child instanceof Node ? child : visible(child))));
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = visible(text);
  return made;
}

function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.map(([key, value]) => [element("dt", {}, key), element("dd", {}, value)]).flat());
}

function table(head, rows) {
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {},
    element("thead", {}, element("tr", {}, head.map((one) => element("th", { scope: "col" }, one)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell) => cell instanceof Node ? cell : element("td", {}, cell)))))));
}

function section(id, title, ...children) {
  return element("section", { id }, element("h2", {}, title), ...children);
}

function colour(index) {
  return "var(--c" + (index % 8) + ")";
}

function dashes(index) {
  return ["", "6 3", "2 3", "8 3 2 3"][Math.floor(index / 8) % 4];
}

function key(index) {
  const made = element("span", { class: "key", "aria-hidden": "true" });
  made.style.borderTopColor = colour(index);
  made.style.borderTopStyle = dashes(index) ? "dashed" : "solid";
  return made;
}

function written(value, unit) {
  if (typeof value === "string") return value;
  if (unit === "bytes") {
    const scale = Math.abs(value) >= 2 ** 30 ? [2 ** 30, " GiB"] : Math.abs(value) >= 2 ** 20 ? [2 ** 20, " MiB"] : [1, " B"];
    return +(value / scale[0]).toPrecision(4) + scale[1];
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return String(+value.toPrecision(3));
  return (+value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}
