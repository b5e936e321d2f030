// Draws what happened in the last seconds: hit rate, bytes by way, and tokens.

import { h } from "../dom.js";
import { SECONDS, sum, WAYS } from "./history.js";
import { bytesText } from "./words.js";

const HEIGHT = 44; // CSS pixels
const AVERAGED = 4; // seconds
const WAY_NAMES = {
  read_through: "read over the link",
  copied: "copied into slots",
  landed: "kept as read",
  computed_by_cpu: "used by the CPU",
  read_from_file: "read from the file",
};

/** Shows three small charts, and the newest values above them. */
export class Charts {
  constructor() {
    this.cards = {
      rate: card("Hit rate", "Uses of experts that were found on the device"),
      bytes: card("Expert bytes", "Bytes of experts a second, by the way they take"),
      tokens: card("Tokens", "Tokens a second that went through the layers, of prompts too"),
    };
    const cards = Object.values(this.cards).map((each) => each.element);
    this.ways = h("div", { class: "x-ways" }, span());
    this.element = h("section", { class: "x-charts", "aria-label": "The last 90 seconds" });
    this.element.append(...cards, this.ways);
    this.shown = [];
    new ResizeObserver(() => this.draw(this.shown)).observe(this.element);
  }

  /**
   * Draw the seconds that are kept; the newest is at the right.
   * @param {import("./history.js").Second[]} seconds
   */
  draw(seconds) {
    this.shown = seconds;
    const last = seconds.at(-1);
    const { rate, bytes, tokens } = this.cards;
    const known = seconds.findLast((each) => each.rate !== null);
    write(rate, known ? `${(100 * known.rate).toFixed(known.rate < 0.9995 ? 1 : 0)} %` : "–");
    const speeds = smoothed(seconds);
    const speed = speeds.at(-1)?.tokens ?? 0;
    const flow = last ? sum(last.bytes) : 0;
    write(bytes, last ? `${bytesText(flow)}/s` : "–");
    write(tokens, last ? `${speed.toFixed(speed < 99.5 ? 1 : 0)} /s` : "–");
    const style = getComputedStyle(this.element);
    plot(rate.canvas, style, [{ name: "--map-device-hot", of: (s) => s.rate }], seconds, 1);
    const ways = WAYS.map((way) => ({ name: `--way-${way}`, of: (s) => s.bytes[way] }));
    plot(bytes.canvas, style, ways, seconds, 0);
    plot(tokens.canvas, style, [{ name: "--accent", of: (s) => s.tokens }], speeds, 0);
    this.nameWays(seconds);
  }

  /** Name the ways that bytes took of late. */
  nameWays(seconds) {
    const used = WAYS.filter((way) => seconds.some((each) => each.bytes[way] > 0));
    if (used.join() === this.named) return;
    this.named = used.join();
    const names = used.map((way) =>
      h("span", { class: "x-key" }, h("i", { class: `x-swatch way-${way}` }), WAY_NAMES[way]),
    );
    this.ways.replaceChildren(...names, span());
  }
}

function span() {
  return h("span", { class: "x-span" }, `last ${SECONDS} s`);
}

function card(name, title) {
  const value = h("strong", { class: "x-value" }, "–");
  const canvas = h("canvas", { class: "x-plot", "aria-hidden": "true" });
  const head = h("div", { class: "x-chart-head" }, h("span", {}, name), value);
  const plotted = h("div", { class: "x-plot-room" }, canvas);
  return { element: h("div", { class: "x-card x-chart", title }, head, plotted), value, canvas };
}

function write({ value }, text) {
  if (value.textContent !== text) value.textContent = text;
}

/**
 * Draw areas upon each other; a second where the first is null is a hole.
 * @param {HTMLCanvasElement} canvas
 * @param {CSSStyleDeclaration} style
 * @param {{name: string, of: (second: any) => number | null}[]} series
 * @param {any[]} seconds
 * @param {number} least of the top of the axis
 */
function plot(canvas, style, series, seconds, least) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const width = Math.round(canvas.parentElement.clientWidth * ratio);
  const height = Math.round(HEIGHT * ratio);
  if (!width) return;
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  context.fillStyle = style.getPropertyValue("--line");
  context.fillRect(0, height - ratio, width, ratio);
  const totals = seconds.map((each) => series.reduce((n, { of }) => n + (of(each) ?? 0), 0));
  const top = Math.max(least, ...totals);
  if (!top) return;
  const floor = seconds.map(() => 0);
  const x = (i) => width * (1 - (seconds.length - 1 - i) / (SECONDS - 1));
  const y = (value) => height - ratio - (value / top) * (height - 4 * ratio);
  for (const { name, of } of series) {
    context.fillStyle = context.strokeStyle = style.getPropertyValue(name).trim();
    context.lineWidth = 1.5 * ratio;
    for (const [first, end] of spans(seconds, of)) {
      const line = new Path2D();
      const area = new Path2D();
      area.moveTo(x(first), y(floor[first]));
      for (let i = first; i < end; i++) {
        const at = y(floor[i] + of(seconds[i]));
        line.lineTo(x(i), at);
        area.lineTo(x(i), at);
      }
      for (let i = end - 1; i >= first; i--) area.lineTo(x(i), y(floor[i]));
      context.globalAlpha = series.length > 1 ? 0.75 : 0.18;
      context.fill(area);
      context.globalAlpha = 1;
      if (series.length === 1) context.stroke(line);
    }
    seconds.forEach((each, i) => (floor[i] += of(each) ?? 0));
  }
}

/** Average tokens over some seconds: slow ones come one in a second, and then two. */
function smoothed(seconds) {
  return seconds.map((_, i) => {
    const near = seconds.slice(Math.max(0, i - AVERAGED + 1), i + 1);
    return { tokens: near.reduce((n, { tokens }) => n + tokens, 0) / near.length };
  });
}

/** Return the spans [first, end) of seconds in which something is known. */
function spans(seconds, of) {
  const found = [];
  seconds.forEach((each, i) => {
    if (of(each) === null) return;
    if (found.length && found.at(-1)[1] === i) found.at(-1)[1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}
