// The sections of the page, in the order of the questions that they answer.

const card = (title, ...children) => h("article.card", h("h3", title), children);
const flatLine = (text) => h("p.flat", text);
const dot = (shade) => h("i.dot", { style: { "--c": shade } });
const table = (about, head, rows) =>
  h("div.scroll", { tabindex: 0, role: "region", "aria-label": about }, h("table",
    h("thead", h("tr", head.map((one) => h("th", { scope: "col" }, one)))),
    h("tbody", rows.map((row) => h("tr", row.map((cell) => h("td", cell)))))));
const words = (value) => (!isThere(value) ? "–" : typeof value === "string" ? value || "“”" : JSON.stringify(value));
const change = (from, to, unit) => (isThere(from) ? `${format(from, unit)} → ` : "") + format(to, unit);
const valuesOf = (run, key) => (run.series[key] ?? []).filter(isThere);
const seedOf = (run) => run.choices.find(([name]) => name === "seed")?.[1];

function figures(run) {
  const told = run.summary, last = (key) => valuesOf(run, key).at(-1);
  const [reward, speed] = [last("reward/mean"), told.tokens_per_s ?? last("tokens/generated_per_s")];
  const measured = isThere(told.accuracy_after);
  return [
    ["held-out accuracy", measured && change(told.accuracy_before, told.accuracy_after, "fraction")],
    ["held-out reward", !measured && isThere(told.validation_after) && change(told.validation_before, told.validation_after)],
    ["held-out loss", isThere(told.loss_after) && change(told.loss_before, told.loss_after)],
    ["reward", isThere(told.reward_last) ? change(told.reward_first, told.reward_last) : isThere(reward) && number(reward)],
    ["steps", run.steps.length > 0 && String(run.steps.at(-1))],
    ["wall time", told.wall_s && clock(told.wall_s)],
    ["tokens/s", speed && number(speed)],
    ["max |Δ log-prob|", told.max_abs_logprob_diff && number(told.max_abs_logprob_diff)],
  ].filter((one) => one[1]);
}

function head(main) {
  const single = main.runs.length === 1, run = main.runs[0], prefix = (one) => (single ? "" : `${one.name}: `);
  const rows = main.groups.flatMap((group, at) => group.runs.map((index) => {
    const one = main.runs[index], by = Object.fromEntries(figures(one));
    const heldOut = by["held-out accuracy"] ?? by["held-out reward"] ?? by["held-out loss"];
    const cells = [one.name, one.state, seedOf(one), by.steps, by.reward, heldOut, by["wall time"], by["tokens/s"]];
    return [h("span", dot(colour(at)), group.label), ...cells.map((cell) => cell ?? "·")];
  }));
  const columns = ["line", "run", "state", "seed", "steps", "reward", "held-out", "wall time", "tokens/s"];
  const notes = main.runs.flatMap((one) => one.notes.map((note) => h("li", prefix(one) + note)));
  return [
    h("p.brand", "Offbeat run report"),
    h("h1", main.title, single && h(`span.state.${run.state.replace(" ", "-")}`, run.state)),
    single && h("p.choices", run.choices.map(([name, value]) => h("span", h("span.dim", `${name} `), value))),
    single && h("dl.figures", figures(run).map(([label, value]) => h("div", h("dt", label), h("dd", value)))),
    !single && table("The runs", columns, rows),
    main.runs.map((one) => one.summary.error && h("p.note.bad", `${prefix(one)}failed: ${one.summary.error}`)),
    notes.length > 0 && h("ul.note", notes),
  ];
}

// Of one run, the metrics of a chart are its lines. Of several, each metric is a chart, and each group a line of it.
function plots(main, told) {
  const series = (run, metric, index) => ({
    ...metric, xs: run.steps, ys: run.series[metric.key] ?? run.steps.map(() => null),
    colour: told.kind === "stack" ? phaseColour(metric.label, index) : colour(index),
  });
  const ofRun = (run) => told.metrics.filter((one) => run.series[one.key]).map((one, index) => series(run, one, index));
  if (main.runs.length === 1) return chartOrLine({ ...told, series: ofRun(main.runs[0]) });
  if (told.kind === "stack")
    return main.groups.map((group) =>
      [h("p.sub", group.label), chartOrLine({ ...told, series: ofRun(main.runs[group.runs[0]]) })]);
  return told.metrics.map((metric) => {
    const lines = main.groups.map((group, at) =>
      joined(group.runs.map((one) => series(main.runs[one], metric, at)), group.label));
    const title = `${told.title}, ${metric.label}`;
    return [h("p.sub", metric.label), chartOrLine({ ...told, title, series: lines })];
  });
}

// The mean over runs that differ in their seed alone, and the band from the lowest to the highest.
function joined(members, label) {
  if (members.length === 1) return { ...members[0], label };
  const at = new Map();
  for (const one of members)
    one.xs.forEach((x, index) => isThere(one.ys[index]) && at.set(x, [...(at.get(x) ?? []), one.ys[index]]));
  const xs = [...at.keys()].sort((one, other) => one - other), all = xs.map((x) => at.get(x));
  const mean = (ys) => ys.reduce((sum, y) => sum + y, 0) / ys.length;
  return { ...members[0], label, xs, ys: all.map(mean), low: all.map(least), high: all.map((ys) => most(ys)) };
}

const isLevel = (ys) => most(ys) - least(ys) <= 1e-4 * most(ys.map(Math.abs));
function chartOrLine(told) {
  const series = told.series.filter((one) => one.ys.some(isThere));
  const found = series.flatMap((one) => one.ys.filter(isThere));
  if (!found.length) return flatLine("not measured");
  if (isLevel(found)) return flatLine(`${format(found.at(-1), series[0].unit)} in every step`);
  return chart({ ...told, series });
}

// What has one value all along is a row of a table; the rest are charts.
function chartCards(main, section) {
  const found = main.charts.filter((one) => one.section === section);
  const all = (metric) => main.runs.flatMap((run) => valuesOf(run, metric.key));
  const isOne = (told) => told.kind !== "stack" || told.metrics.length === 1;
  const level = (told) => isOne(told) && told.metrics.every((one) => isLevel(all(one)));
  const flags = (told) => main.runs.flatMap((run) => run.flags.filter((flag) => flag.title === told.title));
  const unusual = (told) => flags(told).length > 0 && h("span.state.failed", "unusual");
  const values = (told) => [...new Set(told.metrics.map((one) => format(all(one).at(-1), one.unit)))].join(", ");
  const rows = found.filter(level).map((told) =>
    [h("span", told.title, " ", unusual(told)), values(told), h("span.dim", `${told.usual} ${told.advice}`)]);
  return [
    h("div.charts", found.filter((one) => !level(one)).map((told) => h(`article.card${flags(told).length ? ".flagged" : ""}`,
      h("h3", told.title, unusual(told)), plots(main, told),
      h("p.usual", h("b", "Usual: "), `${told.usual} ${told.advice}`)))),
    rows.length > 0 && h("article.card.level", h("h3", "The same in every step"),
      table("What never changed", ["chart", "value", "usual"], rows)),
  ];
}

function learned(run) {
  const told = run.summary, name = run.series["reward/mean"] ? "reward/mean" : "train/loss";
  const values = valuesOf(run, name);
  const count = Math.max(1, Math.min(5, Math.floor(values.length / 2)));
  const mean = (list) => number(list.reduce((sum, value) => sum + value, 0) / list.length);
  const what = name === "reward/mean" ? "The mean reward" : "The loss";
  const heldOut = isThere(told.accuracy_before) && isThere(told.accuracy_after);
  const accuracy = change(told.accuracy_before, told.accuracy_after, "fraction");
  return [
    heldOut && `Held-out accuracy went from ${accuracy.replace("→", "to")}.`,
    values.length > 1 && `${what} of the first ${plural(count, "step")} is ${mean(values.slice(0, count))}, ` +
      `of the last ${mean(values.slice(-count))}.`,
    values.length === 0 && "No step was finished.",
  ].filter(Boolean).join(" ");
}

function advice(main) {
  const items = main.runs.flatMap((run) => run.advice.map((one) => h("li", main.runs.length > 1 && `${run.name}: `,
    h("b", one.seen), `: ${one.means}.`, one.setting && [" Try: ", h("code", one.setting), "."])));
  return items.length > 0 && [h("h3", { id: "h-advice" }, "What to try"), h("ul.note", { "aria-labelledby": "h-advice" }, items)];
}

function health(main) {
  const bound = (flag) => (isThere(flag.high) ? "at most " : "at least ") + format(flag.high ?? flag.low, flag.unit);
  const flags = main.runs.flatMap((run) => run.flags.map((flag) => h("li", main.runs.length > 1 && `${run.name}: `,
    `${flag.title}: ${flag.key} is ${format(flag.value, flag.unit)} at the end, usual is ${bound(flag)}.`)));
  if (flags.length) return h("ul.note.bad", flags);
  return h("p.verdict", "Nothing that has a usual range lies outside of it at the end.");
}

function budget(run) {
  const told = run.summary, names = Object.keys(run.series).map((key) => key.match(/^time\/(.*)_s$/)?.[1]);
  const phases = names.filter((name) => name && !name.startsWith("engine"));
  const order = [...new Set([...run.phases, ...phases])].filter((name) => phases.includes(name));
  const total = (name) => valuesOf(run, `time/${name}_s`).reduce((sum, value) => sum + value, 0);
  const parts = order.map((name) => [name, total(name), phaseColour(name)]), warmup = told.warmup_s ?? 0;
  if (told.startup_s) parts.unshift(["start", told.startup_s - warmup, colour(7)], ["warm-up", warmup, colour(6)]);
  const sum = parts.reduce((all, one) => all + one[1], 0);
  if (!sum) return flatLine("not measured");
  const more = { reward: " (waiting for scores, making the batch)", start: " (until the first step could begin)" };
  return [
    h("div.budget", { "aria-hidden": "true" },
      parts.map(([, seconds, shade]) => h("i", { style: { "--c": shade, "flex-grow": seconds / sum } }))),
    h("ul.legend", parts.filter((one) => one[1] > 0).map(([name, seconds, shade]) =>
      h("li.key", dot(shade), name, more[name], " ", h("b", clock(seconds)), ` ${((100 * seconds) / sum).toFixed(1)}\u00a0%`))),
  ];
}

// What is shown of one run at a time: of several, a choice of whose it is.
function ofOneRun(main, make) {
  const place = h("div");
  const show = async (index) => replace(place, await make(main.runs[index], index));
  show(0);
  const label = (run) => (isThere(seedOf(run)) ? `${run.name} (seed ${seedOf(run)})` : run.name);
  const options = main.runs.map((run, value) => h("option", { value }, label(run)));
  const choice = h("select", { onchange: (event) => show(Number(event.target.value)) }, options);
  return [main.runs.length > 1 && h("label.which", "Run ", choice), place];
}

async function time(run, index) {
  const trace = run.timeline && (await block(`timeline-${index}`));
  const cut = h("p.usual", "Only its end is shown; trace.json has more, for ui.perfetto.dev.");
  return [
    run.summary.where_time_went && h("p.verdict", `In all, ${run.summary.where_time_went}.`),
    card(run.summary.startup_s ? "The whole run" : "All steps", budget(run)),
    card("Timeline", trace ? [timeline(trace), trace.cut && cut] : flatLine("no trace in this folder")),
  ];
}

function settings(run) {
  const compared = run.defaults_known, { packages, ...machine } = run.machine;
  const rows = run.settings.map(([key, ...values]) => [h("code", key), ...values.slice(0, compared ? 2 : 1).map(words)]);
  const median = (all) => [...all].sort((one, other) => one - other)[all.length >> 1];
  const parts = [["transfer", "transfer_s", "s"], ["verify", "verify_s", "s"], ["change over", "flip_s", "s"],
    ["pause of generation", "pause_s", "s"], ["speed", "gb_per_s", "GB/s"], ["weights", "bytes", "bytes"]];
  const measured = parts.map(([label, key, unit]) => [label, valuesOf(run, `sync/${key}`), unit])
    .filter((one) => one[1].length).map(([label, all, unit]) => [label, format(median(all), unit), format(most(all), unit)]);
  const hardware = Object.entries(machine).map(([key, value]) => [key, [value].flat().map(words).join(", ")]);
  const told = [...hardware, ...Object.entries(packages ?? {})], syncs = ["part", "median", "most"];
  return h("div.charts",
    card(compared ? "Settings that differ from the recipe's" : "All settings",
      rows.length ? table("Settings", ["setting", "value", ...(compared ? ["default"] : [])], rows) : flatLine("none")),
    card("Versions and hardware",
      told.length ? table("Versions", ["what", "which"], told) : flatLine("not recorded in this folder")),
    card("Weight syncs", measured.length ? table("Weight syncs", syncs, measured) : flatLine("none was measured"),
      run.went_by.length > 0 && h("ul.plain", run.went_by.map((line) => h("li", line)))));
}

function render(main) {
  const put = (id, ...children) => replace($(`#${id} .body`), children);
  tokenBlocks.clear(); // a live page has new ones
  [shared.charts, timelines].forEach(forgotten); // of what was drawn before the last time
  document.title = `${main.title} · Offbeat`;
  replace($("#head"), head(main));
  put("learn", main.runs.length === 1 && h("p.verdict", learned(main.runs[0])), advice(main), chartCards(main, "learn"));
  put("health", health(main), chartCards(main, "health"));
  put("time", ofOneRun(main, time), chartCards(main, "time"));
  const none = "no completions are kept in this folder";
  put("said", ofOneRun(main, (run, index) => (run.rows ? rollouts(index, run) : flatLine(none))));
  put("what", ofOneRun(main, settings));
  replace($("#foot"), `Written ${main.made}. Drag in a chart to zoom, double click for all; arrow keys read single steps.`);
}

const first = JSON.parse($("#main").textContent);
render(first); // the blocks below may still be on their way
if (first.live) {
  let have = first.version;
  setInterval(async () => {
    if (document.hidden || $("#said").contains(document.activeElement)) return; // whoever reads is not disturbed
    try {
      const answer = await (await fetch(`data.json?have=${have}`)).json();
      if (!answer.main) return;
      have = answer.main.version;
      blocks = answer.blocks;
      render(answer.main);
    } catch {
      $("#foot").textContent = "The server has ended; this is what it showed last.";
    }
  }, 3000);
}
