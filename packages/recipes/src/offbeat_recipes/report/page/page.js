"use strict";
// What all parts of the page share: making elements (text is never markup), numbers for people, data, colours.

const $ = (selector, root = document) => root.querySelector(selector);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// h("p.note", {id: "a"}, "text", [more]): attributes may be left out, and children may be nothing.
function made(space, tag, rest) {
  const [name, ...classes] = tag.split(".");
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  const element = document.createElementNS(`http://www.w3.org/${space}`, name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  return fill(element, attributes, rest);
}
const h = (tag, ...rest) => made("1999/xhtml", tag, rest);
const svg = (tag, ...rest) => made("2000/svg", tag, rest);
// As `replaceChildren`, of lists within lists, without what is nothing.
const replace = (element, ...children) => (element.replaceChildren(), fill(element, {}, children));

const most = (values, start = -Infinity) => values.reduce((best, value) => Math.max(best, value), start);
const least = (values) => values.reduce((best, value) => Math.min(best, value), Infinity);
const isThere = (value) => value !== null && value !== undefined;
function number(value) {
  if (typeof value !== "number") return String(value ?? "·"); // of a run of another version, say
  const size = Math.abs(value);
  for (const [from, unit, name] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= from * 0.9995) return `${(value / unit).toPrecision(3)} ${name}`;
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1).replace("e-", "e−");
}
function clock(seconds) {
  if (typeof seconds !== "number") return number(seconds);
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const [hours, minutes, rest] = [seconds / 3600, (seconds % 3600) / 60, seconds % 60].map(Math.floor);
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(rest)} s`;
}
function format(value, unit) {
  if (typeof value !== "number") return number(value);
  if (unit === "fraction") return `${Number((value * 100).toPrecision(3))}\u00a0%`;
  if (unit === "s") return value >= 60 ? clock(value) : `${number(value)} s`;
  if (unit === "bytes") return `${number(value)}B`;
  return number(value) + (unit ? ` ${unit}` : "");
}
const axis = (value, unit) => (unit === "fraction" ? format(value, unit) : number(value).replace(" ", ""));
const forgotten = (elements) => elements.forEach((one) => one.isConnected || elements.delete(one));
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// Phases have the same colour in every chart; other series take them in turn.
const PHASES = {
  generate: 0, train: 1, sync: 2, "under way": 2, reward: 3, validate: 4, evaluate: 4, save: 5, drain: 6, paused: 6,
};
const colour = (index) => `var(--c${index % 8})`;
const phaseColour = (name, index = 7) => colour(PHASES[name] ?? index);
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Blocks of compressed JSON: of the page itself, or, of a live one, as they came with the newest data.
let blocks = null;
const parsed = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));
async function block(name) {
  await parsed;
  const text = blocks ? blocks[name] : $(`script[data-block="${name}"]`)?.textContent;
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}
