"use strict";
// Making elements. Text always goes in as a text node: nowhere is markup parsed.

const SVG = "http://www.w3.org/2000/svg";

// An HTML element. Attributes named on... are listeners; null and false ones are left out.
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// The same for SVG.
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// A <select> under a label, of values, or of [value, text] pairs; "" is any.
function choice(label, values, onchange) {
  const select = el("select", { "aria-label": label, onchange });
  const offer = (offered) =>
    select.replaceChildren(
      ...offered.map((one) => {
        const [value, text] = Array.isArray(one) ? one : [one, one];
        return el("option", { value }, value === "" ? "any" : String(text));
      }),
    );
  offer(values);
  return { select, offer, field: el("label", { class: "field" }, `${label} `, select) };
}

// A table of rows of cells (text or elements); the first column and the head are headings.
function table(head, rows) {
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          head.map((text) => el("th", {}, text)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((cells) =>
          el(
            "tr",
            {},
            cells.map((cell, i) =>
              cell instanceof Node && cell.tagName === "TD" ? cell : el(i ? "td" : "th", {}, cell),
            ),
          ),
        ),
      ),
    ),
  );
}

// A number for people: four digits, no trailing zeros.
function short(value) {
  if (value === null || value === undefined) return "-";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

// A count with its thousands apart.
function grouped(count) {
  return count.toLocaleString("en-US");
}
