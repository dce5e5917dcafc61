// Where a step's time goes: the waterfall of one step, and its seconds in a table.

const PHASES = ["evaluate", "generate", "measure", "update", "reshard", "save"];

// What a row of metrics says of the time of its step: {seconds, phases, rows} for the waterfall and its table.
function timesOf(run, row) {
  const at = (key) => run.columns[key]?.[row] ?? null;
  const known = Object.keys(run.columns)
    .filter((key) => key.startsWith("cohort/time/") && key !== "cohort/time/step")
    .map((key) => key.slice("cohort/time/".length));
  const phases = [...PHASES.filter((p) => known.includes(p)), ...known.filter((p) => !PHASES.includes(p))].filter(
    (p) => at(`cohort/time/${p}`) !== null,
  );
  const names = Object.keys(run.agents);
  let from = 0;
  const bars = phases.map((phase) => {
    const seconds = at(`cohort/time/${phase}`);
    const bar = { phase, from, seconds, style: `p${Math.max(0, PHASES.indexOf(phase))}`, waits: 0 };
    from += seconds;
    return bar;
  });
  const seconds = Math.max(at("cohort/time/step") ?? from, from) || 1; // a row without times: an empty picture
  const rows = [
    { name: "cohort", bars },
    ...names.map((name) => ({
      name,
      bars: bars
        .map((bar) => {
          const own = at(`agent/${name}/time/${bar.phase}`);
          return own === null
            ? null
            : { ...bar, seconds: Math.min(own, bar.seconds), waits: Math.max(0, bar.seconds - own) };
        })
        .filter(Boolean),
    })),
  ];
  return { seconds, phases, rows, rest: seconds - from };
}

// The section of the page; null where no run has times.
function time(runs) {
  if (!runs.some((run) => run.columns["cohort/time/step"])) return null;
  const picture = el("div"),
    said = el("output");
  const run = choice(
    "run",
    runs.map((r, i) => [i, r.name]),
    () => {
      fill();
      draw();
    },
  );
  const slider = el("input", { type: "range", min: 0, "aria-label": "step", oninput: draw });
  function fill() {
    const last = runs[run.select.value].columns.step.length - 1;
    slider.max = last;
    slider.value = Math.floor(last / 2);
  }
  function draw() {
    const own = runs[run.select.value],
      row = Number(slider.value);
    const { seconds, phases, rows, rest } = timesOf(own, row);
    said.textContent = `step ${own.columns.step[row]}, ${short(seconds)} s`;
    const cells = [
      ...rows.map((line) => [
        line.name,
        ...phases.map((phase) => {
          const bar = line.bars.find((b) => b.phase === phase);
          return bar ? `${short(bar.seconds)} s` : "-";
        }),
        line.name === "cohort" ? `${short(rest)} s` : "-",
        `${short(line.bars.reduce((sum, bar) => sum + bar.waits, 0))} s`,
      ]),
    ];
    picture.replaceChildren(
      waterfall(rows, seconds),
      el(
        "p",
        { class: "legend" },
        phases.map((phase) =>
          el("span", {}, el("i", { class: `box p${Math.max(0, PHASES.indexOf(phase))}` }), ` ${phase}`),
        ),
        el("span", {}, el("i", { class: "box waits p1" }), " waits"),
      ),
      table(["", ...phases, "the rest", "waits"], cells),
    );
  }
  fill();
  draw();
  return el(
    "section",
    { id: "time" },
    el("h2", {}, "Where a step's time goes"),
    el(
      "p",
      { class: "pale" },
      "Phases follow each other; agents work at once within a phase, and who is done waits (pale). The rest of a step reads answers, votes, rewards and hands over the GPUs.",
    ),
    el("div", { class: "filters" }, run.field, slider, said),
    picture,
  );
}
