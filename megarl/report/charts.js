// Charts in plain SVG: lines over steps, and the waterfall of one step.

const WIDE = 380,
  HIGH = 200,
  LEFT = 52,
  RIGHT = 10,
  TOP = 10,
  BOTTOM = 24;

// Round values between two bounds, about `count` of them.
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

// [lowest, highest] of the values with some air; a flat line lies in the middle.
function range(values) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const air = (high - low) * 0.06;
  return [low >= 0 && low < air ? 0 : low - air, high + air];
}

// A figure with one line per series {name, style, points: [[step, value], ...], marks: [[step, value, text], ...]}.
// `pick(step)` is called where the reader clicks. Marks are circles, with their text as title.
function lineChart(title, series, pick) {
  const points = series.flatMap((s) => s.points);
  const [x0, x1] = range(points.map((p) => p[0])).map(Math.round);
  const [y0, y1] = range(points.map((p) => p[1]));
  const x = (step) => LEFT + ((step - x0) / (x1 - x0 || 1)) * (WIDE - LEFT - RIGHT);
  const y = (value) => HIGH - BOTTOM - ((value - y0) / (y1 - y0)) * (HIGH - TOP - BOTTOM);
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title },
    axes(x, y, [x0, x1], [y0, y1]),
  );
  for (const s of series) {
    const path = s.points
      .map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`)
      .join("");
    picture.append(svg("path", { d: path, class: `line ${s.style}` }));
    if (s.points.length === 1)
      picture.append(svg("circle", { cx: x(s.points[0][0]), cy: y(s.points[0][1]), r: 2.5, class: `dot ${s.style}` }));
  }
  for (const s of series) {
    for (const [step, value, text] of s.marks) {
      picture.append(
        svg(
          "circle",
          { cx: x(step), cy: y(value), r: 5, class: "mark" },
          svg("title", {}, `step ${step}, ${s.name}: ${text}`),
        ),
      );
    }
  }
  const figure = el("figure", {}, el("figcaption", {}, title), picture);
  if (title.startsWith("cohort/") && series.length > 1) figure.append(legend(series.map((s) => [s.style, s.name])));
  hover(figure, picture, series, x, pick);
  return figure;
}

function axes(x, y, [x0, x1], [y0, y1]) {
  const group = svg("g", { class: "axes" });
  for (const value of ticks(y0, y1, 4)) {
    group.append(
      svg("line", { x1: LEFT, x2: WIDE - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end" }, short(value)),
    );
  }
  for (const step of ticks(x0, x1, 6, true)) {
    group.append(svg("text", { x: x(step), y: HIGH - 8, "text-anchor": "middle" }, String(step)));
  }
  return group;
}

// Under the pointer: a line at the nearest step, and every series' value there.
function hover(figure, picture, series, x, pick) {
  const steps = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))];
  const rule = svg("line", { y1: TOP, y2: HIGH - BOTTOM, class: "rule", visibility: "hidden" });
  const note = el("div", { class: "note", hidden: true });
  picture.append(rule);
  figure.append(note);
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDE;
    return nearestTo(at, steps, x);
  };
  picture.addEventListener("pointermove", (event) => {
    const step = nearest(event);
    rule.setAttribute("x1", x(step));
    rule.setAttribute("x2", x(step));
    rule.setAttribute("visibility", "visible");
    const values = series.map((s) => [s, s.points.find((p) => p[0] === step)]).filter(([, point]) => point);
    note.replaceChildren(
      el("b", {}, `step ${step}`),
      ...values.map(([s, point]) => el("div", {}, swatch(s.style), ` ${s.name} ${short(point[1])}`)),
    );
    note.hidden = false;
    note.style.left = x(step) > WIDE / 2 ? "auto" : "55%";
    note.style.right = x(step) > WIDE / 2 ? "52%" : "auto";
  });
  picture.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    note.hidden = true;
  });
  if (pick) picture.addEventListener("click", (event) => pick(nearest(event)));
}

// Lines and what they are: [[style, text], ...].
function legend(entries) {
  const texts = entries.map(([style, text]) => el("span", {}, swatch(style), ` ${text}`));
  return el("p", { class: "legend" }, texts);
}

// Of several things the one whose place is nearest.
function nearestTo(wanted, things, place) {
  return things.reduce((best, one) => (Math.abs(place(one) - wanted) < Math.abs(place(best) - wanted) ? one : best));
}

// A piece of a series' line, for legends.
function swatch(style) {
  return svg("svg", { viewBox: "0 0 24 8", class: "swatch" }, svg("path", { d: "M0 4H24", class: `line ${style}` }));
}

// One step over time: rows [{name, bars: [{phase, style, from, seconds, waits}, ...]}]; `waits` follows the bar, pale.
function waterfall(rows, seconds) {
  const wide = 900,
    high = 26,
    left = 110,
    foot = 22;
  const x = (at) => left + (at / seconds) * (wide - left - 12);
  const picture = svg("svg", {
    viewBox: `0 0 ${wide} ${rows.length * high + foot}`,
    role: "img",
    "aria-label": "waterfall of a step",
    class: "waterfall",
  });
  for (const at of ticks(0, seconds, 8)) {
    picture.append(
      svg("line", { x1: x(at), x2: x(at), y1: 0, y2: rows.length * high, class: "grid" }),
      svg("text", { x: x(at), y: rows.length * high + 15, "text-anchor": "middle" }, `${short(at)} s`),
    );
  }
  rows.forEach((row, i) => {
    picture.append(svg("text", { x: left - 8, y: i * high + 17, "text-anchor": "end" }, row.name));
    for (const bar of row.bars) {
      const box = (from, length, kind, text) =>
        svg(
          "rect",
          {
            x: x(from),
            y: i * high + 4,
            width: Math.max(0, x(from + length) - x(from)),
            height: high - 8,
            class: kind,
          },
          svg("title", {}, text),
        );
      picture.append(box(bar.from, bar.seconds, bar.style, `${row.name}, ${bar.phase}: ${short(bar.seconds)} s`));
      if (bar.waits > 0)
        picture.append(
          box(
            bar.from + bar.seconds,
            bar.waits,
            `${bar.style} waits`,
            `${row.name} waits for the others to ${bar.phase}: ${short(bar.waits)} s`,
          ),
        );
    }
  });
  return picture;
}
