// The trace of a run on a canvas: who did what when. Drag to zoom, arrow keys to move, + and - to zoom, 0 for all.

const timelines = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timelines.forEach((one) => one.draw()));

function timeline(data) {
  const AXIS = 20, GAP = 6, LABEL = 92;
  const tracks = data.tracks.map((track) =>
    ({ ...track, height: track.curve.length ? 34 : 22, peak: most(track.curve.map((point) => point[1]), 1) }));
  const height = AXIS + tracks.reduce((sum, track) => sum + track.height + GAP, 0);
  const label = `Timeline of ${tracks.map((track) => track.name).join(", ")} over ${clock(data.ms / 1000)}.`;
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `${label} Arrow keys move, plus and minus zoom.` });
  const told = h("output.told", "Point at a span to read it; drag to zoom.");
  const button = (label, title, act) => h("button", { type: "button", title, "aria-label": title, onclick: act }, label);
  const bar = h("div.bar", button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
    button("←", "Earlier", () => pan(-0.5)), button("→", "Later", () => pan(0.5)),
    button("All", "Show all", () => set(0, data.ms)), told);
  const element = h("div.timeline", bar, canvas);
  let [from, to, width, drag] = [0, data.ms, 0, null];
  const at = (ms) => LABEL + ((ms - from) / (to - from)) * (width - LABEL);
  const ms = (pixel) => from + ((pixel - LABEL) / (width - LABEL)) * (to - from);

  function set(start, end) {
    const span = Math.min(Math.max(end - start, 0.5), data.ms);
    from = Math.min(Math.max(start, 0), data.ms - span);
    to = from + span;
    draw();
  }
  const zoom = (factor, around = (from + to) / 2) => set(around - (around - from) * factor, around + (to - around) * factor);
  const pan = (share) => set(from + (to - from) * share, to + (to - from) * share);

  function draw() {
    width = Math.max(element.clientWidth, 200);
    const scale = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [width * scale, height * scale];
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const [ink, soft, rule] = ["--ink", "--soft", "--rule"].map(cssColour);
    const paint = (name) => cssColour(`--c${PHASES[name] ?? 7}`);
    const narrow = (to - from) / 1000;
    for (const tick of ticks(from / 1000, to / 1000, Math.max(2, width / 110))) {
      const x = at(tick * 1000);
      if (x < LABEL) continue;
      pen.fillStyle = rule;
      pen.fillRect(x, AXIS - 4, 1, height);
      pen.fillStyle = soft;
      pen.fillText(narrow > 180 ? clock(tick) : `${Number(tick.toPrecision(6))} s`, x + 3, 11);
    }
    let top = AXIS;
    for (const track of tracks) {
      track.top = top;
      pen.save();
      pen.beginPath();
      pen.rect(LABEL, top, width - LABEL, track.height);
      pen.clip();
      curve(pen, track, cssColour("--c0"));
      spans(pen, track, paint);
      for (const [time] of track.marks) {
        pen.fillStyle = ink;
        pen.fillRect(at(time), top, 1, track.height);
      }
      pen.restore();
      pen.fillStyle = soft;
      pen.fillText(track.name, 0, top + track.height / 2 + 4, LABEL - 8);
      top += track.height + GAP;
    }
    if (drag && Math.abs(drag.to - drag.from) > 2) {
      pen.globalAlpha = 0.15;
      pen.fillStyle = ink;
      pen.fillRect(Math.min(drag.from, drag.to), AXIS, Math.abs(drag.to - drag.from), height);
    }
  }
  function curve(pen, track, shade) {
    if (!track.curve.length) return;
    const y = (value) => track.top + track.height - (value / track.peak) * (track.height - 2);
    pen.beginPath();
    let before = 0;
    for (const [time, value] of track.curve) {
      pen.lineTo(at(time), y(before));
      pen.lineTo(at(time), y(value));
      before = value;
    }
    pen.lineTo(width, y(before));
    pen.strokeStyle = shade;
    pen.lineWidth = 1.25;
    pen.stroke();
  }
  function spans(pen, track, paint) {
    let last = -1;
    for (const [start, length, name] of track.spans) {
      const [x0, x1] = [at(start), at(start + length)];
      if (x1 < LABEL || x0 > width || (x1 - x0 < 0.5 && Math.floor(x0) === last)) continue;
      last = Math.floor(x0);
      pen.fillStyle = paint(name);
      const full = !track.curve.length, left = Math.max(x0, LABEL), thick = full ? track.height : 6;
      pen.fillRect(left, track.top + track.height - thick, Math.max(x1 - left, 1), thick);
      if (full && x1 - left > 48) {
        pen.fillStyle = cssColour("--paper");
        pen.fillText(name, left + 5, track.top + track.height / 2 + 4, x1 - left - 8);
      }
    }
  }
  function describe(x, y) {
    const track = tracks.find((one) => y >= one.top && y < one.top + one.height + GAP);
    if (!track || x < LABEL) return "";
    const time = ms(x), slack = (to - from) / (width - LABEL);
    const mark = track.marks.find(([when]) => Math.abs(when - time) < 3 * slack);
    const span = track.spans.findLast(([start, length]) => start - slack <= time && time <= start + length + slack);
    const words = [`${track.name} at ${number(time / 1000)} s`];
    if (span) words.push(`${span[2]} for ${number(span[1] / 1000)} s${span[3] ? ` (${span[3]})` : ""}`);
    if (mark) words.push(mark[1]);
    const point = track.curve.findLast(([when]) => when <= time);
    if (point) words.push(`${number(point[1])} under way or ready`);
    return words.join(" · ");
  }
  const place = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    told.textContent = describe(x, y) || "Point at a span to read it; drag to zoom.";
    if (drag) (drag.to = x), draw();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") return;
    canvas.setPointerCapture(event.pointerId);
    drag = { from: event.offsetX, to: event.offsetX };
  });
  canvas.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    const [low, high] = done ? [done.from, done.to].sort((one, other) => one - other) : [0, 0];
    if (high - low > 4) set(ms(low), ms(high));
  });
  canvas.addEventListener("dblclick", () => set(0, data.ms));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, ms(place(event)[0]));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const acts = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "-": () => zoom(2), 0: () => set(0, data.ms),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  });
  new ResizeObserver(() => element.clientWidth !== width && draw()).observe(element);
  element.draw = draw;
  timelines.add(element);
  return element;
}
