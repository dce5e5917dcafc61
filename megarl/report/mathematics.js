// Mathematics in what models write. KaTeX makes MathML of it: no fonts, no styles, no links (trust is off). Models
// write anything, so all of it is bounded: the length of a formula, how many there are, the time they take.

const FORMULA =
  /\$\$([^]{1,2000}?)\$\$|\\\[([^]{1,2000}?)\\\]|\\\(([^]{1,2000}?)\\\)|\$(?!\s)([^$\n]{1,1000}?)\$(?!\d)/g;
const LONGEST = 2000,
  MOST = 200,
  MILLISECONDS = 300;

// An element with the formula; null where KaTeX has none for it.
function formula(source, displayMode) {
  if (source.length > LONGEST) return null;
  const element = el("span", { class: displayMode ? "formula display" : "formula" });
  try {
    katex.render(source, element, {
      displayMode,
      output: "mathml",
      throwOnError: true,
      trust: false,
      maxExpand: 100,
      maxSize: 20,
      strict: "ignore",
    });
  } catch {
    return null; // not TeX, or more than the bounds allow (deep nesting ends in a RangeError)
  }
  return element;
}

// Text with its formulas, as nodes; what is no formula stays the text that it is.
function mathematics(text) {
  const nodes = [],
    start = performance.now();
  let done = 0,
    count = 0;
  for (const found of text.matchAll(FORMULA)) {
    if (++count > MOST || performance.now() - start > MILLISECONDS) break;
    const element = formula(
      found[1] ?? found[2] ?? found[3] ?? found[4],
      found[1] !== undefined || found[2] !== undefined,
    );
    if (!element) continue;
    nodes.push(text.slice(done, found.index), element);
    done = found.index + found[0].length;
  }
  return [...nodes, text.slice(done)];
}

// An answer as it was read: mathematics where it looks like it.
function answer(text) {
  if (text === null) return el("i", { class: "pale" }, "unread");
  return (
    (/[\\^_]/.test(text) && formula(text, false)) ||
    el("code", {}, text.length > 300 ? `${text.slice(0, 300)} ...` : text)
  );
}
