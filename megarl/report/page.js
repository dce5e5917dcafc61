// The page: what is drawn of which metrics, in which order. Data is what command.py describes of every run.

const { runs, version, made } = JSON.parse(document.getElementById("data").textContent);

// Metrics by the question they answer: those of agents by their names, those of the cohort with their "cohort/".
const CHARTS = [
  [
    "Is it right?",
    "Against true answers, where the data has them. Nothing of this reaches a reward.",
    [
      "eval/accuracy",
      "label/label_accuracy",
      "label/sampled_accuracy",
      "reward/reward_accuracy",
      "label/label_accuracy_kept",
    ],
  ],
  [
    "How sure is it of itself?",
    "The vote of an agent's own answers, and how often two agents' majorities agree.",
    [
      "label/majority_share_total",
      "label/vote_margin",
      "cohort/agreement",
      "label/answer_entropy",
      "policy/entropy",
      "label/unlabeled_share",
    ],
  ],
  [
    "What is it paid?",
    "Rewards, and the share of groups from which nothing is learnt as all are paid alike.",
    ["reward/reward_mean", "reward/reward_spread", "reward/zero_variance_share", "reward/reward_mean_verify"],
  ],
  [
    "What does it write?",
    "Tokens of a response, and the share that was cut.",
    [
      "engine/response_tokens",
      "engine/response_tokens_verify",
      "engine/response_tokens_revise",
      "engine/truncated_share",
      "label/answered_share",
    ],
  ],
  [
    "How does it verify?",
    "Turns after the answer: what is verified and kept, and what the verdicts are worth.",
    [
      "verifier/accuracy",
      "verifier/correct_recall",
      "verifier/wrong_recall",
      "verifier/kept_share",
      "verifier/verified_share",
      "verifier/well_formed_share",
      "verifier/wrong_to_right",
      "verifier/right_to_wrong",
      "verifier/label_accuracy_kept",
    ],
  ],
  [
    "Is it healthy?",
    "Drift is |logprob by engine - by policy|; signs of collapse are circled wherever their metric is drawn.",
    [
      "policy/logprob_drift_mean",
      "policy/grad_norm",
      "policy/kl",
      "policy/clip_share",
      "policy/loss",
      "policy/skipped_steps",
    ],
  ],
  [
    "How fast is it?",
    "Tokens of the rollouts, prompts included, per second of the whole step and per GPU (or CPU slot).",
    ["time/tokens_per_second_per_gpu", "cohort/time/step"],
  ],
];

const MEMORY = /memory|high_water|(^|[/_])gib(_|$)/;

// Who has metrics in a run: its agents and its seats, each once.
const namesOf = (run) => [...new Set([...run.seats, ...Object.keys(run.agents)])];
const allNames = [...new Set(runs.flatMap(namesOf))];

// One run: an agent is a colour. Several: a run is a colour and an agent a dash.
const styleOf = (r, i) => (runs.length > 1 ? `c${r % 8} d${i % 4}` : `c${i % 8} d0`);
const titled = (r, name) => (runs.length > 1 ? `${runs[r].name} ${name}`.trim() : name || "cohort");

// The lines of a metric: of every run and agent, or of every run and pair of agents.
function seriesOf(metric) {
  const found = [];
  runs.forEach((run, r) => {
    const keys = metric.startsWith("cohort/")
      ? Object.keys(run.columns)
          .filter((key) => key === metric || key.startsWith(`${metric}/`))
          .map((key, i) => [key, key.slice(metric.length + 1), i])
      : namesOf(run).map((name) => [`agent/${name}/${metric}`, name, allNames.indexOf(name)]);
    for (const [key, name, i] of keys) {
      const points = (run.columns[key] ?? [])
        .map((value, row) => [run.columns.step[row], value])
        .filter(([, value]) => value !== null);
      const marks = run.signs
        .filter((s) => s.key === key)
        .map((s) => [s.step, points.find((p) => p[0] === s.step)?.[1], s.text])
        .filter((m) => m[1] !== undefined);
      if (points.length) found.push({ name: titled(r, name), style: styleOf(r, i), points, marks });
    }
  });
  return found;
}

// All metrics of all runs by the names that seriesOf knows.
function metricNames() {
  const found = new Set();
  runs.forEach((run) => {
    for (const key of Object.keys(run.columns)) {
      const name = namesOf(run)
        .filter((n) => key.startsWith(`agent/${n}/`))
        .sort((a, b) => b.length - a.length)[0];
      if (name !== undefined) found.add(key.slice(`agent/${name}/`.length));
      else if (key.startsWith("cohort/")) found.add(key.includes("~") ? key.split("/").slice(0, 2).join("/") : key);
    }
  });
  return [...found].sort();
}

// Steps that have trained: an evaluation after the last one has a row of its own.
function stepsDone(run) {
  return (run.columns["cohort/time/generate"] ?? run.columns.step).filter((value) => value !== null).length;
}

// The first and the last value of what one looks at first.
function overview() {
  const shown = [
    ["accuracy (held out)", "eval/accuracy"],
    ["label accuracy", "label/label_accuracy"],
    ["majority share", "label/majority_share_total"],
    ["reward", "reward/reward_mean"],
    ["entropy", "policy/entropy"],
    ["tokens", "engine/response_tokens"],
    ["drift", "policy/logprob_drift_mean"],
  ];
  const ends = (values) => {
    const there = (values ?? []).filter((v) => v !== null);
    return there.length > 1 ? `${short(there[0])} \u2192 ${short(there.at(-1))}` : there.length ? short(there[0]) : "-";
  };
  const rows = runs.flatMap((run) =>
    namesOf(run).map((name) => {
      const agent = run.agents[name] ?? {};
      return [
        run.name,
        run.method,
        name,
        agent.layout ?? "-",
        String(stepsDone(run)),
        ...shown.map(([, metric]) => ends(run.columns[`agent/${name}/${metric}`])),
      ];
    }),
  );
  const lines = runs.flatMap((run, r) =>
    run.seats.map((name) => [styleOf(r, allNames.indexOf(name)), titled(r, name)]),
  );
  return el(
    "section",
    { id: "overview" },
    el("h2", {}, "Overview"),
    table(["run", "method", "agent", "policy", "steps", ...shown.map(([title]) => title)], rows),
    legend(lines),
  );
}

// The charts of these metrics, and in a line those that are 0 throughout; none of those that no run has.
function figures(metrics, show) {
  const known = metrics.map((metric) => [metric, seriesOf(metric)]).filter(([, series]) => series.length);
  const isStill = ([, series]) => series.every((one) => one.points.every((point) => point[1] === 0));
  const still = known.filter(isStill).map(([metric]) => metric);
  const drawn = known.filter((one) => !isStill(one)).map(([metric, series]) => lineChart(metric, series, show));
  return still.length ? [...drawn, el("p", { class: "pale still" }, `0 throughout: ${still.join(", ")}`)] : drawn;
}

// `show(step)` is what a click into a chart does.
function curves(show) {
  const memory = metricNames().filter((metric) => MEMORY.test(metric));
  const groups = [...CHARTS, ["How much memory?", "As the run has measured it.", memory]];
  const sections = groups.map(([title, about, metrics]) => {
    const drawn = figures(metrics, show);
    if (!drawn.length) return null;
    return [el("h3", {}, title), el("p", { class: "pale" }, about), el("div", { class: "grid" }, drawn)];
  });
  return el("section", { id: "curves" }, el("h2", {}, "Curves"), sections, anyMetric(show));
}

// Every other metric, one at a time.
function anyMetric(show) {
  const place = el("div", { class: "grid" });
  const names = metricNames().filter((name) => seriesOf(name).length);
  const metric = choice("metric", names, draw);
  function draw() {
    const name = metric.select.value;
    place.replaceChildren(lineChart(name, seriesOf(name), show));
  }
  const details = el(
    "details",
    { ontoggle: () => details.open && draw() },
    el("summary", {}, "Every metric"),
    metric.field,
    place,
  );
  return details;
}

function signs() {
  const found = runs.flatMap((run) => run.signs.map((s) => [run.name, String(s.step), s.key, s.text]));
  return el(
    "section",
    { id: "signs" },
    el("h2", {}, "Signs of collapse"),
    found.length
      ? [
          el(
            "p",
            { class: "pale" },
            "Seen without true answers, and no proof: a rewards' spread also falls where everybody has become right.",
          ),
          table(["run", "step", "metric", "what it shows"], found),
        ]
      : el("p", {}, "None."),
  );
}

// [key, value] of every leaf of a configuration.
function leaves(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, inner]) => leaves(inner, path ? `${path}.${key}` : key));
}

function configuration() {
  const flat = runs.map((run) => new Map(leaves(run.config)));
  const keys = [...new Set(flat.flatMap((values) => [...values.keys()]))].filter(
    (key) => new Set(flat.map((values) => values.get(key))).size > 1,
  );
  return el(
    "section",
    { id: "config" },
    el("h2", {}, "Configuration"),
    runs.length > 1
      ? [
          el("p", { class: "pale" }, "What differs between the runs:"),
          table(
            ["key", ...runs.map((run) => run.name)],
            keys.map((key) => [key, ...flat.map((values) => values.get(key) ?? "-")]),
          ),
        ]
      : null,
    runs.map((run) =>
      el(
        "details",
        {},
        el("summary", {}, `${run.name}: config.yaml and environment.json`),
        el("p", { class: "pale" }, run.path),
        el("pre", {}, run.yaml),
        el("pre", {}, JSON.stringify(run.environment, null, 1)),
      ),
    ),
  );
}

const browser = rolloutsBrowser(runs);
const parts = [overview(), curves(browser.show), signs(), time(runs), configuration(), browser.section].filter(Boolean);
document.querySelector("main").append(...parts);
document
  .querySelector("nav")
  .append(
    ...parts.map((part) => el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)),
    el("span", { class: "pale" }, `megarl ${version}, ${made}`),
  );
