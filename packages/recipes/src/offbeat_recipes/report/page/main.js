// The sections of the page, in the order of the questions that they answer.

const joined = (list) => list.filter(Boolean).join(" · ");
const card = (title, ...children) => h("article", { class: "card" }, h("h3", {}, title), children);
const table = (head, rows) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col" }, one)))),
  h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
const words = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value || "“”" : JSON.stringify(value));
const change = (from, to, unit) => (from === null || from === undefined ? format(to, unit) : `${format(from, unit)} → ${format(to, unit)}`);

function figures(run) {
  const told = run.summary, last = (key) => run.series[key]?.findLast((value) => value !== null);
  return [
    ["held-out accuracy", told.accuracy_after != null && change(told.accuracy_before, told.accuracy_after, "fraction")],
    ["held-out reward", told.accuracy_after == null && told.validation_after != null && change(told.validation_before, told.validation_after)],
    ["held-out loss", told.loss_after != null && change(told.loss_before, told.loss_after)],
    ["reward", told.reward_last != null ? change(told.reward_first, told.reward_last) : last("reward/mean") !== undefined && number(last("reward/mean"))],
    ["steps", run.steps.length > 0 && String(run.steps.at(-1))],
    ["wall time", told.wall_s && clock(told.wall_s)],
    ["tokens/s", told.tokens_per_s ? number(told.tokens_per_s) : last("tokens/generated_per_s") !== undefined && number(last("tokens/generated_per_s"))],
    ["max |Δ log-prob|", told.max_abs_logprob_diff && number(told.max_abs_logprob_diff)],
  ].filter((one) => one[1]);
}

function head(main) {
  const single = main.runs.length === 1, run = main.runs[0];
  return [
    h("p", { class: "brand" }, "Offbeat run report"),
    h("h1", {}, main.title, single && h("span", { class: `state ${run.state.replace(" ", "-")}` }, run.state)),
    single && h("p", { class: "choices" }, run.choices.map(([name, value]) => h("span", {}, h("span", { class: "dim" }, `${name} `), value))),
    single && h("dl", { class: "figures" }, figures(run).map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    !single && table(["run", "state", "seed", "steps", "reward", "held-out", "wall time", "tokens/s"], main.groups.flatMap((group) => group.runs.map((index) => {
      const one = main.runs[index], by = Object.fromEntries(figures(one));
      return [h("span", {}, h("i", { class: "dot", style: { "--c": colour(main.groups.indexOf(group)) } }), group.label), one.state, words(one.choices.find(([name]) => name === "seed")?.[1]),
        by.steps, by.reward, by["held-out accuracy"] ?? by["held-out reward"] ?? by["held-out loss"], by["wall time"], by["tokens/s"]].map((cell) => cell ?? "·");
    }))),
    main.runs.flatMap((one) => [one.summary.error && h("p", { class: "note bad" }, `${single ? "" : `${one.name}: `}failed: ${one.summary.error}`)]),
    main.runs.some((one) => one.notes.length) && h("ul", { class: "note" }, main.runs.flatMap((one) => one.notes.map((note) => h("li", {}, single ? note : `${one.name}: ${note}`)))),
  ];
}

// Of one run, the metrics of a chart are its lines. Of several, each metric is a chart, each group a line with a band over its seeds.
function plots(main, told) {
  const series = (run, metric, index) => ({ ...metric, colour: told.kind === "stack" ? phaseColour(metric.label, index) : colour(index), xs: run.steps, ys: run.series[metric.key] ?? run.steps.map(() => null) });
  const each = (metrics, run) => metrics.filter((metric) => run.series[metric.key]).map((metric, index) => series(run, metric, index));
  if (main.runs.length === 1 || told.kind === "stack")
    return main.groups.map((group) => [main.groups.length > 1 && h("p", { class: "sub" }, group.label), flatOrChart({ ...told, series: each(told.metrics, main.runs[group.runs[0]]) })]);
  return told.metrics.map((metric) => {
    const lines = main.groups.map((group, index) => joinedSeeds(group.runs.map((one) => series(main.runs[one], metric, index)), group.label)).filter((one) => one.ys.some((y) => y !== null));
    return lines.length > 0 && [h("p", { class: "sub" }, metric.label), flatOrChart({ ...told, title: `${told.title}, ${metric.label}`, series: lines })];
  });
}
function joinedSeeds(members, label) {
  if (members.length === 1) return { ...members[0], label };
  const at = new Map();
  for (const one of members) one.xs.forEach((x, index) => one.ys[index] !== null && at.set(x, [...(at.get(x) ?? []), one.ys[index]]));
  const xs = [...at.keys()].sort((one, other) => one - other), all = xs.map((x) => at.get(x));
  return { ...members[0], label, xs, ys: all.map((ys) => ys.reduce((sum, y) => sum + y, 0) / ys.length), low: all.map((ys) => Math.min(...ys)), high: all.map((ys) => Math.max(...ys)) };
}
const isFlat = (ys) => Math.max(...ys) - Math.min(...ys) <= 1e-4 * Math.max(...ys.map(Math.abs));
function flatOrChart(told) {
  const found = told.series.flatMap((one) => one.ys.filter((y) => y !== null));
  if (!found.length) return h("p", { class: "flat" }, "not measured");
  return isFlat(found) ? h("p", { class: "flat" }, `${format(found.at(-1), told.series[0].unit)} in every step`) : chart(told);
}

function chartCards(main, section) {
  const found = main.charts.filter((one) => one.section === section);
  // What never changes is a line of a table and no picture.
  const level = (told) => told.kind !== "stack" || told.metrics.length === 1 ? told.metrics.every((metric) => {
    const all = main.runs.flatMap((run) => (run.series[metric.key] ?? []).filter((y) => y !== null));
    return all.length < 2 || isFlat(all);
  }) : false;
  const value = (told) => [...new Map(told.metrics.map((metric) => [format(main.runs.flatMap((run) => run.series[metric.key] ?? []).findLast((y) => y !== null), metric.unit), 0])).keys()].join(", ");
  const usual = (told) => [h("b", {}, "Usual: "), told.usual, told.advice && [" ", told.advice]];
  const flagsOf = (told) => main.runs.flatMap((run) => run.flags.filter((flag) => flag.title === told.title));
  const unusual = (told) => flagsOf(told).length > 0 && h("span", { class: "state failed" }, "unusual");
  const flat = found.filter(level);
  return [h("div", { class: "charts" }, found.filter((one) => !level(one)).map((told) => h("article", { class: `card${flagsOf(told).length ? " flagged" : ""}` },
    h("h3", {}, told.title, unusual(told)), plots(main, told), h("p", { class: "usual" }, usual(told))))),
    flat.length > 0 && h("article", { class: "card level" }, h("h3", {}, "The same in every step"), table(["", "value", "usual"],
      flat.map((told) => [h("span", {}, told.title, " ", unusual(told)), value(told), h("span", { class: "dim" }, told.usual, " ", told.advice)])))];
}

function learned(run) {
  const told = run.summary, of = (key) => run.series[key]?.filter((value) => value !== null) ?? [];
  const name = run.series["reward/mean"] ? "reward/mean" : "train/loss", values = of(name), count = Math.max(1, Math.min(5, Math.floor(values.length / 2)));
  const mean = (list) => list.reduce((sum, value) => sum + value, 0) / list.length;
  const what = name === "reward/mean" ? "The mean reward" : "The loss";
  const parts = [
    told.accuracy_before != null && told.accuracy_after != null && `Held-out accuracy went from ${format(told.accuracy_before, "fraction")} to ${format(told.accuracy_after, "fraction")}`,
    values.length > 1 && `${what} of the first ${plural(count, "step")} is ${number(mean(values.slice(0, count)))}, of the last ${number(mean(values.slice(-count)))}`,
    values.length === 0 && "No step was finished",
  ];
  return `${parts.filter(Boolean).join(". ")}.`;
}

function health(main) {
  const flags = main.runs.flatMap((run) => run.flags.map((flag) => [run, flag]));
  const bound = (flag) => (flag.high !== null ? `at most ${flag.high}` : `at least ${flag.low}`);
  if (!flags.length) return h("p", { class: "verdict" }, "Nothing that has a usual range lies outside of it at the end.");
  return h("ul", { class: "note bad" }, flags.map(([run, flag]) => h("li", {}, `${main.runs.length > 1 ? `${run.name}: ` : ""}${flag.title}: ${flag.key} is ${number(flag.value)} at the end, usual is ${bound(flag)}.`)));
}

function budget(run) {
  const told = run.summary, total = (name) => (run.series[`time/${name}_s`] ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
  const phases = Object.keys(run.series).map((key) => key.match(/^time\/(.*)_s$/)?.[1]).filter((name) => name && !["engine", "engine_tokens_per"].includes(name));
  const order = [...run.phases, ...phases.filter((name) => !run.phases.includes(name))].filter((name) => phases.includes(name));
  const parts = order.map((name) => [name, total(name), phaseColour(name)]);
  if (told.startup_s) parts.unshift(["start", told.startup_s - (told.warmup_s ?? 0), "var(--c7)"], ["warm-up", told.warmup_s ?? 0, "var(--c6)"]);
  const sum = parts.reduce((all, one) => all + one[1], 0);
  if (!sum) return h("p", { class: "flat" }, "not measured");
  const names = { reward: "reward (waiting for scores, making the batch)", start: "start (until the first step could begin)" };
  return [h("div", { class: "budget", "aria-hidden": "true" }, parts.map(([, seconds, shade]) => h("i", { style: { "--c": shade, "flex-grow": String(seconds / sum) } }))),
    h("ul", { class: "legend" }, parts.filter((one) => one[1] > 0).map(([name, seconds, shade]) => h("li", { class: "key" }, h("i", { style: { "--c": shade } }), names[name] ?? name, " ", h("b", {}, clock(seconds)), ` ${(100 * seconds / sum).toFixed(1)} %`)))];
}

// What of one run is shown in full: of several, a choice of whose it is.
function ofOneRun(main, make) {
  const place = h("div", {});
  const show = (index) => Promise.resolve(make(main.runs[index], index)).then((made) => replace(place, made));
  show(0);
  return [main.runs.length > 1 && h("label", { class: "which" }, "Run ", h("select", { onchange: (event) => show(Number(event.target.value)) },
    main.runs.map((run, index) => h("option", { value: index }, `${run.name} ${joined(run.choices.filter(([name]) => name === "seed").map(([, seed]) => `seed ${seed}`))}`)))), place];
}

function settings(run) {
  const rows = run.settings.map(([key, value, before]) => [h("code", {}, key), words(value), run.defaults_known ? words(before) : ""]);
  const { packages = {}, ...machine } = run.machine;
  const column = (key, pick) => { const all = (run.series[key] ?? []).filter((value) => value !== null); return all.length ? pick(all) : null; };
  const middle = (all) => [...all].sort((one, other) => one - other)[all.length >> 1], most = (all) => Math.max(...all);
  const syncs = [["transfer", "sync/transfer_s", "s"], ["verify", "sync/verify_s", "s"], ["change over", "sync/flip_s", "s"], ["pause of generation", "sync/pause_s", "s"], ["speed", "sync/gb_per_s", "GB/s"], ["bytes", "sync/bytes", "bytes"]]
    .map(([label, key, unit]) => [label, column(key, middle), column(key, most), unit]).filter((one) => one[1] !== null);
  return h("div", { class: "charts" },
    card(run.defaults_known ? "Settings that differ from the recipe's" : "All settings", rows.length ? table(["setting", "value", run.defaults_known ? "default" : ""], rows) : h("p", { class: "flat" }, "none")),
    card("Versions and hardware", Object.keys(run.machine).length ? table(["", ""], [...Object.entries(machine).map(([key, value]) => [key, [value].flat().join(", ")]), ...Object.entries(packages)]) : h("p", { class: "flat" }, "not recorded in this folder")),
    card("Weight syncs", syncs.length ? table(["", "median", "most"], syncs.map(([label, one, other, unit]) => [label, format(one, unit), format(other, unit)])) : h("p", { class: "flat" }, "none was measured"), run.went_by.length > 0 && h("ul", { class: "plain" }, run.went_by.map((line) => h("li", {}, line)))));
}

function render(main) {
  const put = (id, ...children) => replace($(`#${id} .body`), children);
  document.title = `${main.title} · Offbeat`;
  replace($("#head"), head(main));
  put("learn", main.runs.length === 1 && h("p", { class: "verdict" }, learned(main.runs[0])), chartCards(main, "learn"));
  put("health", health(main), chartCards(main, "health"));
  put("time", ofOneRun(main, async (run, index) => {
    const trace = run.timeline && (await block(`timeline-${index}`));
    return [run.summary.where_time_went && h("p", { class: "verdict" }, `In all, ${run.summary.where_time_went}.`), card("The whole run", budget(run)),
      card("Timeline", trace ? [timeline(trace), trace.cut && h("p", { class: "usual" }, "Only its end is shown; trace.json has more, for ui.perfetto.dev.")] : h("p", { class: "flat" }, "no trace in this folder"))];
  }), chartCards(main, "time"));
  put("said", ofOneRun(main, (run, index) => (run.rows ? rollouts(index, run) : h("p", { class: "flat" }, "no completions are kept in this folder"))));
  put("what", ofOneRun(main, settings));
  $("#foot").replaceChildren(`Written ${main.made}. Drag in a chart to zoom, double click for all; arrow keys read single steps.`);
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
