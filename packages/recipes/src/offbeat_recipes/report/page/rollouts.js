// The browser of completions: blocks load one after the other, a list draws only the rows that are seen.

const ROW = 32;
const MARK = { true: " ✓", false: " ✗", null: "" };
const verdictOf = (row) => ({ true: "right", false: "wrong" })[row.correct] ?? "";
const oneLine = (text) => text.replace(/\s+/g, " ").trim();

function rollouts(index, run) {
  const rows = [], byPrompt = new Map();
  let hits = [], chosen = -1;
  const select = (...options) => h("select", { onchange: filter }, options.map(([value, said]) => h("option", { value }, said)));
  const bound = (placeholder, label) =>
    h("input.short", { type: "number", step: "any", placeholder, "aria-label": `${label} ${placeholder}`, oninput: filter });
  const text = h("input", { type: "search", placeholder: "text of prompt or completion", oninput: filter });
  const bounds = ["step", "reward"].map((key) => [key, bound("from", key), bound("to", key)]);
  const finish = select(["", "any finish"]);
  const verdict = select(["", "right or wrong"], ["true", "right"], ["false", "wrong"]);
  const order = select(["", "as they came"], ["worst", "lowest reward first"], ["best", "highest reward first"],
    ["long", "longest first"], ["late", "newest first"]);
  const by = h("select", { onchange: paint }, COLOUR_BY.map(([value, said]) => h("option", { value }, said)));
  let open = null; // the completion that is shown, with the passages that can be coloured
  const field = (label, ...inputs) =>
    h(inputs.length > 1 ? "div.field" : "label.field", h("span", label), h("span.pair", inputs));
  const controls = h("form.controls", { onsubmit: (event) => event.preventDefault() }, field("Search", text),
    bounds.map(([key, ...pair]) => field({ step: "Steps", reward: "Reward" }[key], ...pair)),
    field("Finish", finish), field("Verdict", verdict), field("Order", order), run.has_tokens && field("Colour tokens by", by));
  const count = h("output.told", "loading …"), inner = h("div.rows");
  const detail = h("div.detail", { tabindex: 0, role: "region", "aria-label": "The chosen completion" });
  const list = h("div.list", { tabindex: 0, role: "listbox", "aria-label": "Completions" }, inner);

  function filter() {
    const part = text.value.toLowerCase(), right = { true: true, false: false }[verdict.value];
    const limits = bounds.flatMap(([key, from, to]) => [[from, 1], [to, -1]].filter(([input]) => input.value !== "")
      .map(([input, sign]) => [key, sign, sign * Number(input.value)]));
    hits = [];
    for (const row of rows) {
      if (finish.value && row.finish !== finish.value) continue;
      if (right !== undefined && row.correct !== right) continue;
      if (!limits.every(([key, sign, limit]) => row[key] !== null && sign * row[key] >= limit)) continue;
      if (!part || row.low.includes(part)) hits.push(row);
    }
    const rank = {
      worst: (row) => row.reward ?? Infinity, best: (row) => -(row.reward ?? -Infinity),
      long: (row) => -row.num_tokens, late: (row) => -row.step,
    }[order.value];
    if (rank) hits.sort((one, other) => rank(one) - rank(other) || one.at - other.at);
    const loaded = rows.length === run.rows;
    const all = loaded ? plural(rows.length, "completion") : `${rows.length.toLocaleString("en")} loaded so far`;
    count.textContent = hits.length === rows.length ? all : `${hits.length.toLocaleString("en")} of ${all}`;
    inner.style.height = `${hits.length * ROW}px`;
    draw();
  }
  function draw() {
    const start = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), end = start + Math.ceil(list.clientHeight / ROW) + 8;
    replace(inner, hits.slice(start, end).map((row, offset) =>
      h("div", { class: `row ${verdictOf(row)}`, role: "option", id: `row-${row.at}`, "aria-selected": String(row.at === chosen),
        style: { top: `${(start + offset) * ROW}px` }, onclick: () => choose(row) },
        h("span.num", row.step), h("span.num.reward", number(row.reward) + MARK[row.correct]), h("span.tag", row.finish),
        h("span.what", h("span.dim", oneLine(row.prompt).slice(-60), " "), oneLine(row.completion).slice(0, 200)))));
    list.setAttribute("aria-activedescendant", chosen < 0 ? "" : `row-${chosen}`);
  }
  function choose(row) {
    chosen = row.at;
    const top = hits.indexOf(row) * ROW;
    if (top >= 0) list.scrollTop = Math.min(Math.max(list.scrollTop, top + ROW - list.clientHeight), top);
    draw();
    show(row);
  }
  function show(row) {
    const same = byPrompt.get(row.uid), others = same.filter((one) => one.step !== row.step).slice(0, 200);
    const group = same.filter((one) => one.step === row.step && one.title === row.title);
    const pick = (one, label) => h(`button.pick.${verdictOf(one) || "unknown"}`,
      { type: "button", "aria-current": one === row && "true", onclick: () => choose(one) }, h("span.num", label),
      h("span.num.reward", number(one.reward) + MARK[one.correct]), h("span.what", oneLine(one.completion).slice(0, 200)));
    const facts = [`step ${row.step}`, row.title, `reward ${number(row.reward)}`, verdictOf(row),
      row.finish && `ended by ${row.finish}`, plural(row.num_tokens, "token")];
    const parts = Object.entries(row.parts ?? {}).map(([name, reward]) => `${name} ${number(reward)}`);
    const turns = row.turns ?? [], told = turns.some((one) => isThere(one.text));
    const passages = told ? turns.map((one) => isThere(one.text) && passage(one.text)) : [passage(row.completion, "pre.completion")];
    open = { row, passages, scale: h("p.facts.scale", { "aria-live": "polite" }) };
    replace(detail, h("p.facts", facts.filter(Boolean).join(" · ")),
      h("h3", "Prompt"), h("pre", row.prompt), h("h3", told ? plural(turns.length, "turn") : "Completion"), open.scale,
      !told && passages[0].elements, turns.map((one, at) => turn(one, told && passages[at], at === turns.length - 1)),
      parts.length > 0 && h("p.facts", parts.join(" · ")),
      group.length > 1 && [h("h3", `All ${group.length} completions of this prompt at step ${row.step}`),
        h("div.picks", group.map((one, at) => pick(one, at + 1)))],
      others.length > 0 && [h("h3", "The same prompt at other steps"), h("div.picks", others.map((one) => pick(one, one.step)))]);
    paint();
  }
  // Which turns are open stays as it is.
  async function paint() {
    const shown = open, tokens = shown && by.value && (await tokensOf(index, shown.row));
    if (!shown || shown !== open) return; // another was chosen meanwhile
    shown.passages.forEach((one, at) => one && one.paint(tokens?.[at], by.value));
    replace(shown.scale, by.value && scale(tokens, by.value));
  }
  // A turn of a trajectory that was kept whole has a text; of one of samples.jsonl the counts are known.
  function turn(one, passage, isLast) {
    const said = isThere(one.reward) && `reward ${number(one.reward)}`;
    const made = one.versions && `version ${[one.versions].flat().map((span) => [span].flat()[0]).join(", ")}`;
    const counts = isThere(one.observed) && `${plural(one.observed, "token")} observed, ${one.sampled} sampled`;
    const length = passage && (isThere(one.num_tokens) ? plural(one.num_tokens, "token") : plural(one.text.length, "character"));
    const facts = [one.role, length, made, counts, said].filter(Boolean).join(" · ");
    if (!passage) return h("p.facts.turn", facts);
    return h("details.turn", { open: isLast && "" }, h("summary", facts), passage.elements);
  }
  list.addEventListener("scroll", draw);
  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1), at = hits.findIndex((row) => row.at === chosen);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: hits.length - 1 };
    if (!(event.key in moves) || !hits.length) return;
    event.preventDefault();
    choose(hits[Math.min(Math.max(moves[event.key], 0), hits.length - 1)]);
  });
  new ResizeObserver(draw).observe(list);

  function take(columns) {
    const keys = Object.keys(columns);
    columns.step.forEach((_, at) => {
      const row = Object.fromEntries(keys.map((key) => [key, columns[key][at]]));
      Object.assign(row, { at: rows.length, low: `${row.prompt}\n${row.completion}`.toLowerCase() });
      byPrompt.has(row.uid) ? byPrompt.get(row.uid).push(row) : byPrompt.set(row.uid, [row]);
      const offered = [...finish.options].some((one) => one.value === row.finish);
      if (!offered) finish.append(h("option", { value: row.finish }, row.finish));
      rows.push(row);
    });
  }
  (async () => {
    for (let number = 0; number < run.blocks; number++) {
      const columns = await block(`rows-${index}-${number}`);
      if (columns) take(columns);
      if (number % 5 === 0) filter();
      if (number === 0 && rows.length) choose(run.blocks === 1 ? rows.at(-1) : rows[0]);
      await new Promise((resume) => setTimeout(resume)); // the page answers meanwhile
    }
    filter();
    list.dataset.loaded = rows.length;
  })();
  return h("div.rollouts", controls, count, h("div.panes", list, detail));
}
