// What was sampled, token by token, coloured by what is known of each. A token is a span that holds its text as text.

const COLOUR_BY = [["", "none"], ["logprob", "log-prob"], ["advantage", "advantage"], ["version", "version"]];
const labelOf = (by) => COLOUR_BY.find(([value]) => value === by)[1];
const [RARE, STRONG] = [-5, 2]; // the log-prob and the advantage whose colour is full
const [BLUE, ORANGE] = [0, 1], SHADES = 6;

// Which shade a value has, and how much of it.
function shadeOf(by, value) {
  if (by === "version") return [((value % SHADES) + SHADES) % SHADES, 1];
  if (by === "logprob") return [ORANGE, Math.min(1, Math.max(0, value / RARE))];
  return [value < 0 ? ORANGE : BLUE, Math.min(1, Math.abs(value) / STRONG)];
}
function token(text, by, value, title) {
  if (!isThere(value)) return h("span", { title }, text);
  const [shade, much] = shadeOf(by, value);
  return h("span.token", { title, style: { "--shade": `var(--t${shade})`, "--much": `${Math.round(100 * much)}%` } }, text);
}
function titleOf(tokens, at) {
  const known = COLOUR_BY.filter(([key]) => isThere(tokens[key]?.[at]));
  return known.map(([key, label]) => `${label} ${number(tokens[key][at])}`).join(" · ");
}

// A line that says what the colours mean: of versions those that are there.
function scale(tokens, by) {
  const values = (tokens ?? []).flatMap((turn) => turn?.[by] ?? []).filter(isThere);
  if (!tokens) return "Of this completion the text alone is in the report.";
  if (!values.length) return `Of this completion no ${labelOf(by)} was kept.`;
  const marks = { logprob: [0, RARE / 4, RARE / 2, RARE], advantage: [-STRONG, -STRONG / 2, 0, STRONG / 2, STRONG] }[by];
  const shown = marks ?? [...new Set(values)].sort((one, other) => one - other);
  const ends = [...new Set([least(values), most(values)].map((one) => number(one)))];
  const span = marks && `, here ${ends.join(" to ")}`;
  return [labelOf(by), span, shown.map((value) => token(number(value), by, value, null))];
}

// A text whose tool calls are folded. `paint` makes spans of its tokens, or the plain text again.
const CALL = /<tool_call>[^]*?(?:<\/tool_call>\s*|$)/g;
function passage(text, kind = "pre") {
  const bounds = [0, ...[...text.matchAll(CALL)].flatMap((call) => [call.index, call.index + call[0].length]), text.length];
  const parts = bounds.slice(1).map((end, at) => ({ begin: bounds[at], end, isCall: at % 2 === 1 }))
    .filter((part) => part.end > part.begin || text === "");
  for (const part of parts) part.pre = h(kind, text.slice(part.begin, part.end));
  const elements = parts.map(({ begin, end, isCall, pre }) =>
    isCall ? h("details.call", h("summary", `tool call · ${plural(end - begin, "character")}`), pre) : pre);
  function paint(tokens, by) {
    const isWhole = tokens?.text.join("") === text; // else a turn is another than the file says
    if (!isWhole || !by) return parts.forEach(({ begin, end, pre }) => replace(pre, text.slice(begin, end)));
    const spans = parts.map(() => []);
    let begin = 0, part = 0;
    tokens.text.forEach((piece, at) => {
      const enters = (next) => begin >= next.begin || (next.isCall && begin + piece.length > next.begin);
      while (part < parts.length - 1 && enters(parts[part + 1])) part++;
      spans[part].push(token(piece, by, tokens[by]?.[at], titleOf(tokens, at)));
      begin += piece.length;
    });
    parts.forEach(({ pre }, at) => replace(pre, spans[at]));
  }
  return { elements, paint };
}

// The tokens of a row by turn; null where only its text is known. Blocks of them load when one is opened.
const tokenBlocks = new Map();
async function tokensOf(index, row) {
  if (!row.tokens) return null;
  const [number, place] = row.tokens, name = `tokens-${index}-${number}`;
  if (!tokenBlocks.has(name)) tokenBlocks.set(name, block(name));
  return (await tokenBlocks.get(name))?.[place] ?? null;
}
