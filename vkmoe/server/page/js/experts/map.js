// Draws the map of experts on a canvas: only cells that changed, and only while something happens.

import { levelOf, readColours } from "./colours.js";
import { cellAt, cellUnder, labelled, layOut } from "./grid.js";

const FRAME_MS = 1000 / 30;
const LASTS_MS = { hit: 320, miss: 520, in: 900, out: 900 };
const SPREAD_MS = 90; // over which the uses of one delta begin, as they came in one after another
const RING = 6; // device pixels of a cell that has room for a ring or a mark

/** Draws a state; the owner says what changed in it. */
export class ExpertMap {
  /** @param {HTMLCanvasElement} canvas which is as wide as its parent */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.state = null;
    this.grid = null;
    /** @type {Map<number, {kind: string, from: number, to: number}>} */
    this.flashes = new Map();
    this.drawn = new Int16Array(0); // what each cell was drawn as: place, level and pin in one
    this.frame = 0;
    this.last = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.onlayout = () => {};
    new ResizeObserver(() => this.fit()).observe(canvas.parentElement);
    const repaint = () => this.recolour();
    new MutationObserver(repaint).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme", "class"],
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  }

  /**
   * Show another state.
   * @param {import("./state.js").ExpertState} state
   */
  show(state) {
    this.state = state;
    this.flashes.clear();
    this.grid = null;
    this.fit();
  }

  /**
   * Show what a change of the state looks like.
   * @param {{key: number, kind: string}[]} flashes
   */
  update(flashes) {
    const now = performance.now();
    flashes.forEach(({ key, kind }, i) => {
      const known = this.flashes.get(key);
      const isMove = kind === "in" || kind === "out";
      if (known && !isMove && (known.kind === "in" || known.kind === "out")) return;
      const from = isMove ? now : now + (SPREAD_MS * i) / flashes.length;
      this.flashes.set(key, { kind, from, to: from + LASTS_MS[kind] });
    });
    this.wake();
  }

  /** Lay the map out anew where its width or the device's pixels changed. */
  fit() {
    const width = Math.floor(this.canvas.parentElement.clientWidth);
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    if (!this.state?.nLayers || !width) return;
    if (this.grid?.width === width && this.grid.ratio === ratio) return;
    const { canvas, state } = this;
    this.grid = layOut(state.nLayers, state.nExperts, width, ratio);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(this.grid.height * ratio);
    canvas.style.height = `${this.grid.height}px`;
    this.recolour();
    this.onlayout();
  }

  /** Draw everything in the colours that hold now. */
  recolour() {
    if (!this.grid) return;
    this.colours = readColours(this.canvas);
    this.drawn = new Int16Array(this.state.places.length).fill(-1);
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.drawLabels();
    this.drawCells(performance.now());
    this.wake();
  }

  /**
   * Find the cell under a pointer.
   * @param {MouseEvent} event
   */
  under(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.grid && cellUnder(this.grid, event.clientX - box.left, event.clientY - box.top);
  }

  /**
   * Return the rectangle of a cell in CSS pixels of the canvas.
   * @param {{layer: number, expert: number}} cell
   */
  boxOf({ layer, expert }) {
    const { x, y, w, h } = cellAt(this.grid, layer, expert);
    const { ratio } = this.grid;
    return { x: x / ratio, y: y / ratio, w: w / ratio, h: h / ratio };
  }

  /** Draw with the next frames, until nothing flashes any more. */
  wake() {
    if (!this.frame && this.grid) this.frame = requestAnimationFrame((now) => this.step(now));
  }

  step(now) {
    this.frame = 0;
    if (now - this.last >= FRAME_MS - 2) {
      this.last = now;
      this.drawCells(now);
    } else {
      this.wake();
    }
    if (this.flashes.size) this.wake();
  }

  drawCells(now) {
    const { state, drawn } = this;
    for (const key of this.flashes.keys()) drawn[key] = -1;
    for (let key = 0; key < drawn.length; key++) {
      const look =
        (levelOf(state.heat[key]) << 1) | state.pinned[key] | ((state.places[key] & 127) << 6);
      if (drawn[key] !== look) {
        drawn[key] = look;
        this.drawCell(key, now);
      }
    }
  }

  drawCell(key, now) {
    const { context, state, colours } = this;
    const expert = key % state.nExperts;
    const { x, y, w, h } = cellAt(this.grid, (key - expert) / state.nExperts, expert);
    context.fillStyle = colours.cells[state.places[key]][levelOf(state.heat[key])];
    context.fillRect(x, y, w, h);
    const flash = this.flashes.get(key);
    if (flash && now >= flash.to) {
      this.flashes.delete(key);
    } else if (flash && now >= flash.from) {
      const gone = (now - flash.from) / (flash.to - flash.from);
      context.globalAlpha = this.still.matches ? 0.8 : (1 - gone) ** 1.5;
      context.fillStyle = colours.flashes[flash.kind];
      const isRing = (flash.kind === "in" || flash.kind === "out") && Math.min(w, h) >= RING;
      if (isRing) this.drawRing(x, y, w, h);
      else context.fillRect(x, y, w, h);
      context.globalAlpha = 1;
    }
    if (state.pinned[key]) this.drawPin(x, y, w, h);
  }

  drawRing(x, y, w, h) {
    const thick = Math.max(1, Math.round(Math.min(w, h) / 5));
    this.context.fillRect(x, y, w, thick);
    this.context.fillRect(x, y + h - thick, w, thick);
    this.context.fillRect(x, y, thick, h);
    this.context.fillRect(x + w - thick, y, thick, h);
  }

  /** Mark a pinned expert by a dot; the whole cell where there is no room for one. */
  drawPin(x, y, w, h) {
    const { context, colours } = this;
    const size = Math.max(2, Math.round(Math.min(w, h) * 0.42));
    context.fillStyle = colours.pin;
    context.fillRect(x + Math.floor((w - size) / 2), y + Math.floor((h - size) / 2), size, size);
  }

  drawLabels() {
    const { context, grid, state, colours } = this;
    const { ratio, xs, ys } = grid;
    context.fillStyle = colours.text;
    context.font = `${10.5 * ratio}px ${colours.of("--font")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const layer of labelled(ys, 15 * ratio)) {
      const middle = (ys[layer] + ys[layer + 1] - grid.gap) / 2;
      context.fillText(String(state.info.layers[layer]), xs[0] - 7 * ratio, middle);
    }
    context.textAlign = "left";
    for (const expert of labelled(xs, 30 * ratio)) {
      context.fillText(String(expert), xs[expert], 8 * ratio);
    }
  }
}
