// The browser of rollouts. A step's block is decoded when it is looked at; what it holds is said in steps.py.

const CARDS = 20,
  TURNS = 24,
  LONG = 6000; // shown at once: questions, rollouts of one, characters of a response
const CACHED = 32e6; // characters of blocks whose decoded rollouts are kept

const decoded = new Map(); // element id -> promise of its data, the latest used last

// The rollouts of one step of a run.
function rolloutsOf(run, step) {
  const id = `rollouts-${run}-${step}`;
  const data = decoded.get(id) ?? decode(document.getElementById(id).textContent);
  decoded.delete(id);
  decoded.set(id, data);
  let held = 0;
  for (const other of [...decoded.keys()].reverse()) {
    held += document.getElementById(other).textContent.length;
    if (held > CACHED && other !== id) decoded.delete(other);
  }
  return data;
}

async function decode(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const { question, parent } = data.rollouts;
  data.members = data.questions.map(() => []); // rows by question
  data.turns = question.map(() => []); // the rows that follow a row
  question.forEach((q, row) => data.members[q].push(row));
  parent.forEach((p, row) => p >= 0 && data.turns[p].push(row));
  return data;
}

// What the filters let through, as [{question, rows}]: rows are those that match themselves.
function matching(data, filter) {
  const of = data.rollouts,
    found = [];
  data.questions.forEach((question, q) => {
    if (filter.agent && question.agent !== filter.agent) return;
    if (filter.label && verdict(question.label === null ? "none" : question.right) !== filter.label) return;
    const asked =
      filter.text &&
      [
        ...data.conversations[question.conversation].map((m) => m.content),
        question.uid,
        question.label ?? "",
        question.gold ?? "",
      ].some((text) => text.toLowerCase().includes(filter.text));
    const rows = data.members[q].filter(
      (row) =>
        (!filter.role || of.role[row] === filter.role) &&
        (!filter.answer || verdict(of.answer[row] === null ? "unread" : of.right[row]) === filter.answer) &&
        (!filter.text ||
          asked ||
          of.text[row].toLowerCase().includes(filter.text) ||
          (of.answer[row] ?? "").toLowerCase().includes(filter.text)),
    );
    if (rows.length) found.push({ data, question: q, rows });
  });
  return found;
}

function verdict(right) {
  return right === true ? "right" : right === false ? "wrong" : right === null ? "unknown" : right;
}

// The fields to choose by. `changed` is called when one has been; `chosen()` says what is asked for.
function rolloutsFilters(runs, changed) {
  const about = el("p", { class: "pale" });
  const fields = {
    run: choice(
      "run",
      runs.map((run, number) => [number, run.name]),
      () => changed(fill()),
    ),
    step: choice("step", [], changed),
    agent: choice("agent", [], changed),
    role: choice("turn", ["", "solve", "verify", "revise"], changed),
    label: choice("label", ["", "right", "wrong", "unknown", "none"], changed),
    answer: choice("answer", ["", "right", "wrong", "unknown", "unread"], changed),
  };
  let typing = 0;
  const search = el("input", {
    type: "search",
    placeholder: "in prompts, responses, answers",
    "aria-label": "search",
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(changed, 200);
    },
  });
  const valueOf = (name) => fields[name].select.value;

  function fill() {
    const { rollouts, seats } = runs[valueOf("run")];
    const all = rollouts.steps.length > 1 ? [["all", `all ${rollouts.steps.length}`]] : [];
    fields.step.offer([...rollouts.steps, ...all]);
    if (rollouts.steps.length) fields.step.select.value = rollouts.steps.at(-1);
    fields.agent.offer(["", ...seats]);
    about.textContent = kept(rollouts);
  }

  function chosen() {
    const names = ["agent", "role", "label", "answer"];
    const filter = Object.fromEntries(names.map((name) => [name, valueOf(name)]));
    filter.text = search.value.trim().toLowerCase();
    const step = valueOf("step");
    const steps = step === "all" ? runs[valueOf("run")].rollouts.steps : [step].filter(Boolean);
    return { run: valueOf("run"), steps, filter };
  }

  function go(step) {
    fields.step.select.value = step;
    changed();
  }

  fill();
  const row = el(
    "div",
    { class: "filters" },
    Object.values(fields).map((one) => one.field),
    search,
  );
  return { about, row, chosen, go };
}

// What of a run's rollouts the page has, in words.
function kept({ steps, of, unknown }) {
  const out = of - steps.length;
  return [
    of ? `Rollouts of ${steps.length} of ${of} steps.` : "This run has no rollouts in its folder.",
    out ? `${out} steps were left out, at even distances: --rollouts-mb makes room for more.` : "",
    unknown ? `What is right is not known: ${unknown}.` : "",
  ].join(" ");
}

// The section of the page. `show(step)` goes, from elsewhere, to the step next to that one, of the run looked at.
function rolloutsBrowser(runs) {
  const list = el("div", { class: "cards" });
  const status = el("p", { class: "status", role: "status" });
  const filters = rolloutsFilters(runs, look);
  const section = el("section", { id: "rollouts" }, el("h2", {}, "Rollouts"), filters.about, filters.row, status, list);
  let turn = 0;

  // Look through the chosen steps; a later look ends an earlier one.
  async function look() {
    const mine = ++turn;
    const { run, steps, filter } = filters.chosen();
    const found = [];
    list.replaceChildren();
    for (const [i, step] of steps.entries()) {
      status.textContent = `reading step ${step} (${i + 1} of ${steps.length}) ...`;
      const data = await rolloutsOf(run, step);
      if (mine !== turn) return;
      found.push(...matching(data, filter).map((match) => ({ ...match, step })));
    }
    const rows = found.reduce((sum, match) => sum + match.rows.length, 0);
    status.textContent = `${grouped(rows)} rollouts of ${grouped(found.length)} questions`;
    list.replaceChildren(...paged(found, CARDS, card));
  }

  function show(wanted) {
    const { steps } = runs[filters.chosen().run].rollouts;
    if (!steps.length) return;
    filters.go(nearestTo(wanted, steps, (step) => step));
    section.scrollIntoView({ behavior: "smooth" });
  }

  if (document.readyState === "loading")
    document.addEventListener("DOMContentLoaded", look); // the blocks come last
  else look();
  return { section, show };
}

// The first of many things, and a button that goes on.
function paged(things, count, draw) {
  const rest = things.slice(count);
  const more = el(
    "button",
    { onclick: () => more.replaceWith(...paged(rest, count, draw)) },
    `show ${Math.min(count, rest.length)} more of ${rest.length}`,
  );
  return [...things.slice(0, count).map(draw), ...(rest.length ? [more] : [])];
}

// A question with its vote; its rollouts are put in when it is opened.
function card(match) {
  const { data, question, step } = match,
    q = data.questions[question];
  const asked = data.conversations[q.conversation].at(-1)?.content ?? "";
  const body = el("div", { class: "body" });
  const details = el(
    "details",
    {
      class: "card",
      ontoggle: () => {
        if (details.open && !body.hasChildNodes()) body.append(...opened(match));
      },
    },
    el(
      "summary",
      {},
      el("span", { class: "agent" }, `${q.agent}, step ${step}`),
      el("span", { class: "asked" }, asked.length > 160 ? `${asked.slice(0, 160)} ...` : asked),
      votes(q),
      el("span", { class: `tag ${verdict(q.right)}` }, q.label === null ? "no label" : ["label ", answer(q.label)]),
    ),
    body,
  );
  return details;
}

// The agent's own vote as a bar: one piece per class of equal answers.
function votes(q) {
  const total = q.clusters.reduce((sum, c) => sum + c.count, 0) || 1;
  return el(
    "span",
    { class: "votes" },
    q.clusters
      .slice(0, 12)
      .map((c) =>
        el(
          "span",
          { class: verdict(c.right), style: `flex-grow: ${c.count / total}`, title: `${c.count} x ${c.answer}` },
          c.count > 1 ? String(c.count) : "",
        ),
      ),
  );
}

function opened({ data, question, rows }) {
  const q = data.questions[question],
    of = data.rollouts;
  const chosen = new Set(rows);
  const tops = data.members[question]
    .filter((row) => of.parent[row] < 0 && within(data, row, chosen))
    .sort((a, b) => of.cluster[a] - of.cluster[b] || of.index[a] - of.index[b]);
  return [
    el(
      "div",
      { class: "asking" },
      data.conversations[q.conversation].map((m) =>
        el("div", { class: "message" }, el("b", {}, m.role), " ", ...mathematics(m.content)),
      ),
    ),
    el(
      "p",
      { class: "facts" },
      `uid ${q.uid}`,
      q.label !== null
        ? [
            " | label ",
            answer(q.label),
            ` by ${q.count} of ${q.total} votes (${q.parsed} could be read)${q.tie ? ", a tie" : ""}`,
          ]
        : " | no label",
      q.gold !== null ? [" | true answer ", answer(q.gold)] : null,
    ),
    el(
      "ul",
      { class: "clusters" },
      q.clusters.slice(0, 12).map((c) => el("li", { class: verdict(c.right) }, `${c.count} x `, answer(c.answer))),
      q.clusters.length > 12 ? el("li", {}, `and ${q.clusters.length - 12} more classes`) : null,
    ),
    ...paged(tops, TURNS, (row) => turns(data, row, chosen)),
  ];
}

// Does a row, or any turn after it, match the filters?
function within(data, row, chosen) {
  return chosen.has(row) || data.turns[row].some((next) => within(data, next, chosen));
}

// A rollout, with the turns that follow it inside: a verdict stands under the answer that it speaks of.
function turns(data, row, chosen) {
  const of = data.rollouts,
    text = of.text[row];
  const response = el("div", { class: "text" }, ...mathematics(text.slice(0, LONG)));
  if (text.length > LONG) {
    const rest = el(
      "button",
      { onclick: () => rest.replaceWith(text.slice(LONG)) },
      `show ${grouped(text.length - LONG)} more characters`,
    );
    response.append(" ", rest);
  }
  const facts = [
    `${of.tokens[row]} tokens`,
    of.stop[row] === "end" ? null : `stopped by ${of.stop[row]}`,
    of.formed[row] ? null : "not well formed",
    of.reward[row] === null ? "trains nothing" : `reward ${of.reward[row]}`,
    of.advantage[row] === null ? null : `advantage ${of.advantage[row]}`,
  ];
  return el(
    "div",
    { class: `turn ${of.role[row]} ${chosen.has(row) ? "" : "context"}` },
    el(
      "div",
      { class: "facts" },
      el("b", {}, `${of.role[row]} ${of.index[row]}`),
      " ",
      el("span", { class: `tag ${verdict(of.right[row])}` }, answer(of.answer[row])),
      ` ${facts.filter(Boolean).join(", ")}`,
    ),
    response,
    data.turns[row].filter((next) => within(data, next, chosen)).map((next) => turns(data, next, chosen)),
  );
}
