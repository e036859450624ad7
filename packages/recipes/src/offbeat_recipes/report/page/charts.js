// Line and area charts in SVG. All share one window of steps and one cursor: what is pointed at in one is read in all.

const shared = { from: null, to: null, step: null, charts: new Set() };
function share(changes) {
  Object.assign(shared, changes);
  for (const chart of shared.charts) chart.isConnected ? chart.refresh("from" in changes) : shared.charts.delete(chart);
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  const start = Math.ceil(low / unit - 1e-9) * unit;
  for (let at = start; at <= high + unit * 1e-9; at += unit) found.push(Number(at.toPrecision(12)));
  return found;
}

// series: [{label, unit, colour, xs, ys, low?, high?}]; kind: "lines", "log" or "stack".
function chart({ title, kind, series }) {
  const log = kind === "log";
  const value = (y) => (log ? (y > 0 ? Math.log10(y) : null) : y);
  const layers = kind === "stack" ? stacked(series) : series;
  const key = (one) => h("span.key", h("i", { style: { "--c": one.colour } }), one.label, " ", h("b"));
  const legend = h("div.legend", series.map(key));
  const drawing = svg("svg", { role: "img", tabindex: 0, height: 150 });
  const element = h("figure.chart", legend, drawing);
  const [left, right, top, bottom] = [46, 6, 6, 18];
  let size = 0, scaleX, line = svg("line.cursor"), window_;

  function nearest(one, step) {
    let best = null;
    for (let index = 0; index < one.xs.length; index++) {
      const nearer = best === null || Math.abs(one.xs[index] - step) < Math.abs(one.xs[best] - step);
      if (one.ys[index] !== null && nearer) best = index;
    }
    return best;
  }
  function read() {
    [...legend.querySelectorAll("b")].forEach((cell, index) => {
      const one = series[index];
      const at = shared.step === null ? one.ys.findLastIndex((y) => y !== null) : nearest(one, shared.step) ?? -1;
      const exact = shared.step === null || one.xs[at] === shared.step;
      cell.textContent = at < 0 ? "·" : format(one.ys[at], one.unit) + (exact ? "" : ` (step ${one.xs[at]})`);
    });
    const shown = shared.step !== null && scaleX;
    line.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const ends = { x1: scaleX(shared.step), x2: scaleX(shared.step), y1: top, y2: 150 - bottom };
    for (const [name, at] of Object.entries(ends)) line.setAttribute(name, at);
  }
  function draw() {
    size = Math.max(element.clientWidth, 160);
    const steps = series.flatMap((one) => one.xs.length ? [one.xs[0], one.xs.at(-1)] : []);
    let [x0, x1] = [shared.from ?? least(steps), shared.to ?? most(steps)];
    if (x0 === x1 || kind === "stack") [x0, x1] = [x0 - 0.5, x1 + 0.5];
    let [y0, y1] = [Infinity, -Infinity];
    for (const one of layers) for (let index = 0; index < one.xs.length; index++) {
      if (one.xs[index] < x0 || one.xs[index] > x1) continue;
      for (const y of [one.ys[index], one.low?.[index], one.high?.[index]]) {
        const at = y === undefined || y === null ? null : value(y);
        if (at !== null) [y0, y1] = [Math.min(y0, at), Math.max(y1, at)];
      }
    }
    if (y0 > y1) [y0, y1] = [0, 1];
    if (!log && y0 > 0 && (kind === "stack" || y0 < y1 * 0.6)) y0 = 0;
    const room = log ? 1 : Math.abs(y0 || 1) * 0.1;
    if (y0 === y1) [y0, y1] = [y0 - room, y1 + room];
    const pad = kind === "stack" ? 0 : (y1 - y0) * 0.05;
    [y0, y1] = [y0 === 0 ? 0 : y0 - pad, y1 + pad];
    scaleX = (x) => left + ((x - x0) / (x1 - x0)) * (size - left - right);
    const scaleY = (y) => 150 - bottom - ((y - y0) / (y1 - y0)) * (150 - top - bottom);
    window_ = { x0, x1, stepAt: (pixel) => x0 + ((pixel - left) / (size - left - right)) * (x1 - x0) };
    const rows = log ? ticks(Math.ceil(y0), Math.floor(y1), 4).filter(Number.isInteger) : ticks(y0, y1, 3);
    const columns = ticks(x0, x1, Math.max(2, size / 90)).filter(Number.isInteger);
    drawing.replaceChildren(
      ...rows.map((y) => svg("g",
        svg("line.grid", { x1: left, x2: size - right, y1: scaleY(y), y2: scaleY(y) }),
        svg("text", { x: left - 6, y: scaleY(y) + 3.5, "text-anchor": "end" },
          log ? `1e${y}`.replace("-", "−") : axis(y, series[0].unit)))),
      ...columns.map((x) => svg("text", { x: scaleX(x), y: 147, "text-anchor": "middle" }, String(x))),
      ...layers.flatMap((one) => shapes(one, { scaleX, scaleY, value, x0, x1, size })), line);
    drawing.setAttribute("viewBox", `0 0 ${size} 150`);
    drawing.setAttribute("aria-label", `${title}. ` + series.map((one) => {
      const there = one.ys.filter((y) => y !== null);
      return `${one.label}: first ${format(there[0], one.unit)}, last ${format(there.at(-1), one.unit)}`;
    }).join("; ") + ". Arrow keys read single steps.");
    read();
  }
  element.refresh = (moved) => (moved ? draw() : read());
  interact(drawing, () => window_, series);
  new ResizeObserver(() => element.clientWidth !== size && draw()).observe(element);
  shared.charts.add(element);
  return element;
}

function stacked(series) {
  const base = series[0].xs.map(() => 0);
  return series.map((one) => {
    const low = [...base];
    one.ys.forEach((y, index) => (base[index] += y ?? 0));
    return { ...one, low, high: [...base], ys: [...base], area: true };
  }).reverse();
}

// The path of a series; of more points than pixels the smallest and the largest of each pixel.
function shapes(one, { scaleX, scaleY, value, x0, x1, size }) {
  const points = [];
  for (let index = 0; index < one.xs.length; index++) {
    const y = one.ys[index] === null ? null : value(one.ys[index]);
    if (y === null || one.xs[index] < x0 || one.xs[index] > x1) continue;
    const edge = (side) => side && scaleY(value(side[index]) ?? y);
    points.push([scaleX(one.xs[index]), scaleY(y), edge(one.low), edge(one.high)]);
  }
  const kept = points.length <= 2 * size ? points : thinned(points);
  const path = (list) => list.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
  const found = [];
  const half = one.area ? Math.min((scaleX(1) - scaleX(0)) / 2, 20) : 0; // areas are columns, a step wide
  if (one.low && (one.area || kept.length > 1)) {
    const edge = (side) => kept.flatMap((p) => [[p[0] - half, p[side]], [p[0] + half, p[side]]]);
    const d = `${path([...edge(3), ...edge(2).reverse()])}Z`;
    found.push(svg(one.area ? "path.area" : "path.band", { d, style: { "--c": one.colour } }));
  }
  if (one.area) return found;
  found.push(svg("path.line", { d: path(kept), style: { "--c": one.colour } }));
  const sparse = points.length === 1 || points.length * 2 < one.xs.length;
  const point = ([cx, cy]) => svg("circle", { cx, cy, r: 3, style: { "--c": one.colour } });
  if (sparse && points.length < 200) found.push(...kept.map(point));
  return found;
}

function thinned(points) {
  const columns = new Map();
  for (const point of points) {
    const at = Math.round(point[0]), have = columns.get(at);
    if (!have) columns.set(at, [point, point]);
    else if (point[1] < have[0][1]) have[0] = point;
    else if (point[1] > have[1][1]) have[1] = point;
  }
  return [...columns.values()].flatMap(([low, high]) => (low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
}

// Pointing and arrow keys move the cursor; dragging, + and - change the window; a double click and Escape show all.
function interact(drawing, view, series) {
  let from = null;
  const near = (step) => {
    const steps = series[0].xs;
    return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
  };
  const stepOf = (event) => view().stepAt(event.clientX - drawing.getBoundingClientRect().left);
  drawing.addEventListener("pointermove", (event) => share({ step: near(stepOf(event)) }));
  drawing.addEventListener("pointerleave", () => share({ step: null }));
  drawing.addEventListener("pointerdown", (event) => (from = event.pointerType === "mouse" ? stepOf(event) : null));
  drawing.addEventListener("pointerup", (event) => {
    const to = stepOf(event);
    const start = least(series.map((one) => one.xs[0])), [low, high] = [Math.min(from, to), Math.max(from, to)];
    if (from !== null && high - low > (view().x1 - view().x0) / 30)
      share({ from: Math.max(Math.floor(low), start), to: Math.ceil(high), step: null });
    from = null;
  });
  drawing.addEventListener("dblclick", () => share({ from: null, to: null }));
  drawing.addEventListener("blur", () => share({ step: null }));
  drawing.addEventListener("keydown", (event) => {
    const steps = series[0].xs, at = shared.step === null ? steps.length - 1 : steps.indexOf(near(shared.step));
    const moves = { ArrowLeft: at - (shared.step === null ? 0 : 1), ArrowRight: at + 1, Home: 0, End: steps.length - 1 };
    const { x0, x1 } = view(), middle = shared.step ?? (x0 + x1) / 2;
    if (event.key in moves) share({ step: steps[Math.min(Math.max(moves[event.key], 0), steps.length - 1)] });
    else if (event.key === "+" && x1 - x0 > 4)
      share({ from: Math.floor((middle + x0) / 2), to: Math.ceil((middle + x1) / 2) });
    else if (event.key === "-" || event.key === "Escape") share({ from: null, to: null });
    else return;
    event.preventDefault();
  });
}
