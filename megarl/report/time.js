// Where a step's time goes: the waterfall of one step, and its seconds in a table.

const PHASES = ["evaluate", "generate", "measure", "update", "reshard", "save"];

const phaseStyle = (phase) => `p${Math.max(0, PHASES.indexOf(phase))}`;

// What a row of metrics says of the time of its step: {seconds, phases, lines, rest}. Lines are of the cohort and of
// each agent: {name, bars}, as the waterfall draws them. Phases follow each other: a bar begins where the last one ends.
function timesOf(run, row) {
  const at = (key) => run.columns[key]?.[row] ?? null;
  const prefix = "cohort/time/";
  const known = Object.keys(run.columns)
    .filter((key) => key.startsWith(prefix) && key !== `${prefix}step` && at(key) !== null)
    .map((key) => key.slice(prefix.length));
  const phases = [...PHASES, ...known.filter((phase) => !PHASES.includes(phase))].filter((p) => known.includes(p));
  let from = 0;
  const bars = phases.map((phase) => {
    const bar = { phase, from, seconds: at(prefix + phase), style: phaseStyle(phase), waits: 0 };
    from += bar.seconds;
    return bar;
  });
  const ofAgent = (name) =>
    bars.flatMap((bar) => {
      const own = at(`agent/${name}/time/${bar.phase}`);
      if (own === null) return [];
      return [{ ...bar, seconds: Math.min(own, bar.seconds), waits: Math.max(0, bar.seconds - own) }];
    });
  const lines = [{ name: "cohort", bars }, ...Object.keys(run.agents).map((name) => ({ name, bars: ofAgent(name) }))];
  const seconds = Math.max(at(`${prefix}step`) ?? from, from) || 1; // a row without times: an empty picture
  return { seconds, phases, lines, rest: seconds - from };
}

// The same in numbers.
function timeTable({ phases, lines, rest }) {
  const rows = lines.map(({ name, bars }, i) => {
    const of = new Map(bars.map((bar) => [bar.phase, bar.seconds]));
    const waits = bars.reduce((sum, bar) => sum + bar.waits, 0);
    return [name, ...phases.map((phase) => short(of.get(phase))), i ? "-" : short(rest), i ? short(waits) : "-"];
  });
  return table(["seconds", ...phases, "the rest", "waits"], rows);
}

// The section of the page; null where no run has times.
function time(runs) {
  if (!runs.some((run) => run.columns["cohort/time/step"])) return null;
  const picture = el("div");
  const said = el("output");
  const names = runs.map((run, number) => [number, run.name]);
  const run = choice("run", names, () => draw(fill()));
  const slider = el("input", { type: "range", min: 0, "aria-label": "step", oninput: draw });

  function fill() {
    const last = runs[run.select.value].columns.step.length - 1;
    slider.max = last;
    slider.value = Math.floor(last / 2);
  }

  function draw() {
    const { columns } = runs[run.select.value];
    const times = timesOf(runs[run.select.value], Number(slider.value));
    said.textContent = `step ${columns.step[slider.value]}, ${short(times.seconds)} s`;
    const boxes = times.phases.map((p) => el("span", {}, el("i", { class: `box ${phaseStyle(p)}` }), ` ${p}`));
    const waits = el("span", {}, el("i", { class: "box waits p1" }), " waits");
    const legend = el("p", { class: "legend" }, boxes, waits);
    picture.replaceChildren(waterfall(times.lines, times.seconds), legend, timeTable(times));
  }

  fill();
  draw();
  const about =
    "Phases follow each other; agents work at once within a phase, and who is done waits (pale). " +
    "The rest of a step reads answers, votes, rewards and hands over the GPUs.";
  return el(
    "section",
    { id: "time" },
    el("h2", {}, "Where a step's time goes"),
    el("p", { class: "pale" }, about),
    el("div", { class: "filters" }, run.field, slider, said),
    picture,
  );
}
