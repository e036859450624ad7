// The browser of completions: blocks load one after the other, a list draws only the rows that are seen.

const ROW = 32;
const MARK = { true: "✓", false: "✗", null: "" };
const verdictOf = (row) => ({ true: "right", false: "wrong" })[row.correct] ?? "";
const oneLine = (text) => text.replace(/\s+/g, " ").trim();

function rollouts(index, run) {
  const rows = [], byPrompt = new Map();
  let hits = [], chosen = -1;
  const field = (label, control) => h("label", {}, h("span", {}, label), control);
  const apply = () => filter();
  const text = h("input", { type: "search", placeholder: "text of prompt or completion", oninput: apply });
  const select = (options) => h("select", { onchange: apply }, options.map(([value, words]) => h("option", { value }, words)));
  const range = (name) => h("input", { type: "number", step: "any", class: "short", placeholder: name, oninput: apply });
  const [step0, step1, reward0, reward1] = [range("from"), range("to"), range("from"), range("to")];
  const finish = select([["", "any finish"]]);
  const verdict = select([["", "right or wrong"], ["true", "right"], ["false", "wrong"]]);
  const order = select([["", "as they came"], ["worst", "lowest reward first"], ["best", "highest reward first"], ["long", "longest first"], ["late", "newest first"]]);
  const count = h("output", { class: "told" }, "loading …");
  const inner = h("div", { class: "rows" });
  const list = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Completions" }, inner);
  const detail = h("div", { class: "detail", "aria-live": "polite" });
  const controls = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    field("Search", text), field("Steps", h("span", { class: "pair" }, step0, step1)), field("Reward", h("span", { class: "pair" }, reward0, reward1)),
    field("Finish", finish), field("Verdict", verdict), field("Order", order));

  const LIMITS = { step0: [step0, "step", 1], step1: [step1, "step", -1], reward0: [reward0, "reward", 1], reward1: [reward1, "reward", -1] };
  function filter() {
    const words = text.value.toLowerCase();
    const bounds = Object.values(LIMITS).filter(([input]) => input.value !== "").map(([input, key, sign]) => [key, sign, sign * Number(input.value)]);
    const right = verdict.value === "" ? null : verdict.value === "true";
    hits = [];
    for (let at = 0; at < rows.length; at++) {
      const row = rows[at];
      if (finish.value && row.finish !== finish.value) continue;
      if (right !== null && row.correct !== right) continue;
      if (!bounds.every(([key, sign, bound]) => row[key] !== null && sign * row[key] >= bound)) continue;
      if (words && !row.low.includes(words)) continue;
      hits.push(at);
    }
    const by = { worst: (row) => row.reward ?? Infinity, best: (row) => -(row.reward ?? -Infinity), long: (row) => -row.num_tokens, late: (row) => -row.step }[order.value];
    if (by) hits.sort((one, other) => by(rows[one]) - by(rows[other]) || one - other);
    const all = rows.length === run.rows ? plural(rows.length, "completion") : `${rows.length.toLocaleString("en")} of ${run.rows.toLocaleString("en")} loaded`;
    count.textContent = hits.length === rows.length ? all : `${hits.length.toLocaleString("en")} of ${all}`;
    inner.style.height = `${hits.length * ROW}px`;
    list.scrollTop = Math.min(list.scrollTop, Math.max(0, hits.length * ROW - list.clientHeight));
    draw();
  }
  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), last = Math.min(hits.length, first + Math.ceil(list.clientHeight / ROW) + 8);
    inner.replaceChildren(...hits.slice(first, last).map((at, offset) => {
      const row = rows[at];
      return h("div", { class: `row ${verdictOf(row)}`, role: "option", id: `row-${at}`, "aria-selected": String(at === chosen), style: { top: `${(first + offset) * ROW}px` }, onclick: () => choose(at) },
        h("span", { class: "num" }, row.step), h("span", { class: "num reward" }, `${number(row.reward)} ${MARK[row.correct]}`),
        h("span", { class: "tag" }, row.finish), h("span", { class: "what" }, h("span", { class: "dim" }, oneLine(row.prompt).slice(-60), " "), oneLine(row.completion).slice(0, 200)));
    }));
    list.setAttribute("aria-activedescendant", chosen < 0 ? "" : `row-${chosen}`);
  }
  function choose(at) {
    chosen = at;
    const position = hits.indexOf(at);
    if (position >= 0) list.scrollTop = Math.min(Math.max(list.scrollTop, (position + 1) * ROW - list.clientHeight), position * ROW);
    draw();
    show(rows[at]);
  }
  function show(row) {
    const same = (byPrompt.get(row.uid) ?? []).map((at) => rows[at]);
    const group = same.filter((one) => one.step === row.step && one.title === row.title);
    const others = same.filter((one) => one.step !== row.step);
    const pick = (one, label) => h("button", { type: "button", class: `pick ${verdictOf(one)}`, "aria-current": one === row && "true", onclick: () => choose(one.at) },
      h("span", { class: "num" }, label), h("span", { class: "num reward" }, `${number(one.reward)} ${MARK[one.correct]}`), h("span", { class: "what" }, oneLine(one.completion)));
    const facts = [`step ${row.step}`, row.title, `reward ${number(row.reward)}`, verdictOf(row), `ended by ${row.finish}`, plural(row.num_tokens, "token")];
    replace(detail,
      h("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
      h("h3", {}, "Prompt"), h("pre", {}, row.prompt), h("h3", {}, "Completion"), h("pre", { class: "completion" }, row.completion),
      Array.isArray(row.turns) && h("details", {}, h("summary", {}, plural(row.turns.length, "turn")), h("ol", {}, row.turns.map((turn) =>
        h("li", {}, `${plural(turn.observed, "token")} observed, ${turn.sampled} sampled, reward ${number(turn.reward)}`)))),
      group.length > 1 && [h("h3", {}, `All ${group.length} completions of this prompt at step ${row.step}`), h("div", { class: "picks" }, group.map((one, number) => pick(one, number + 1)))],
      others.length > 0 && [h("h3", {}, "The same prompt at other steps"), h("div", { class: "picks" }, others.slice(0, 200).map((one) => pick(one, one.step)))]);
  }
  list.addEventListener("scroll", draw);
  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1), at = hits.indexOf(chosen);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: hits.length - 1 };
    if (!(event.key in moves) || !hits.length) return;
    event.preventDefault();
    choose(hits[Math.min(Math.max(moves[event.key], 0), hits.length - 1)]);
  });
  new ResizeObserver(draw).observe(list);

  (async () => {
    for (let number = 0; number < run.blocks; number++) {
      const columns = await block(`rows-${index}-${number}`);
      if (!columns) continue;
      const keys = Object.keys(columns);
      for (let at = 0; at < columns.step.length; at++) {
        const row = { at: rows.length };
        for (const key of keys) row[key] = columns[key][at];
        row.low = `${row.prompt}\n${row.completion}`.toLowerCase();
        byPrompt.has(row.uid) ? byPrompt.get(row.uid).push(row.at) : byPrompt.set(row.uid, [row.at]);
        if (row.finish && ![...finish.options].some((one) => one.value === row.finish)) finish.append(h("option", { value: row.finish }, row.finish));
        rows.push(row);
      }
      if (number < 2 || number % 5 === 0) filter();
      if (number === 0 && rows.length) choose(rows.length - 1 < run.rows - 1 ? 0 : rows.length - 1);
      await new Promise((resume) => setTimeout(resume)); // the page answers meanwhile
    }
    filter();
    list.dataset.loaded = rows.length;
  })();
  return h("div", { class: "rollouts" }, controls, count, h("div", { class: "panes" }, list, detail));
}
