// Lets a pointer or the arrow keys choose an expert of the map, explains it, and pins it.

import { h } from "../dom.js";
import { explain } from "./words.js";

const ARROWS = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
};
const MARGIN = 10; // between a cell and what explains it, in CSS pixels

/** Shows a ring around the chosen cell, and an explanation beside it. */
export class Pointer {
  /**
   * @param {import("./map.js").ExpertMap} map
   * @param {HTMLElement} room the map's parent, which places are counted from
   * @param {(layer: number, expert: number) => void} toggle pins, or unpins
   */
  constructor(map, room, toggle) {
    this.map = map;
    this.room = room;
    this.toggle = toggle;
    this.cell = null;
    this.gesture = "Click";
    this.ring = h("div", { class: "x-ring", hidden: true });
    this.tip = h("div", { class: "x-tip", id: "x-tip", role: "status", hidden: true });
    room.append(this.ring, this.tip);
    const { canvas } = map;
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") this.choose(map.under(event), "Click");
    });
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.choose(null);
    });
    canvas.addEventListener("click", (event) => this.click(event));
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("focus", () => {
      // A click brings the focus as well, and has a cell of its own.
      if (canvas.matches(":focus-visible")) this.choose(this.last ?? { layer: 0, expert: 0 }, "Enter");
    });
  }

  click(event) {
    const cell = this.map.under(event);
    if (!cell) return this.choose(null);
    const isTouch = event.pointerType === "touch";
    const isAgain = this.cell?.layer === cell.layer && this.cell?.expert === cell.expert;
    this.choose(cell, isTouch ? "Tap again" : "Click");
    // A finger has no way to look without touching: its first tap explains.
    if (!isTouch || isAgain) this.toggle(cell.layer, cell.expert);
  }

  press(event) {
    const { state } = this.map;
    if (!state?.nLayers || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = this.cell ?? this.last ?? { layer: 0, expert: 0 };
    if (event.key === "Enter" || event.key === " ") {
      this.choose(now, "Enter");
      this.toggle(now.layer, now.expert);
    } else if (event.key === "Escape") {
      this.choose(null);
    } else if (event.key in ARROWS) {
      const [down, right] = ARROWS[event.key];
      const layer = Math.max(0, Math.min(state.nLayers - 1, now.layer + down));
      const expert = Math.max(0, Math.min(state.nExperts - 1, now.expert + right));
      this.choose({ layer, expert }, "Enter");
    } else if (event.key === "Home" || event.key === "End") {
      this.choose({ ...now, expert: event.key === "Home" ? 0 : state.nExperts - 1 }, "Enter");
    } else {
      return;
    }
    event.preventDefault();
  }

  /**
   * Choose a cell, or none.
   * @param {{layer: number, expert: number} | null} cell
   * @param {string} [gesture] which pins it
   */
  choose(cell, gesture = this.gesture) {
    this.cell = cell;
    this.gesture = gesture;
    if (cell) this.last = cell;
    this.show();
  }

  /** Explain the chosen cell as it is now. */
  show() {
    const { state, grid } = this.map;
    const cell = this.cell;
    const isThere = Boolean(
      cell && grid && state && cell.layer < state.nLayers && cell.expert < state.nExperts,
    );
    this.ring.hidden = this.tip.hidden = !isThere;
    if (!isThere) return;
    const told = explain(state, cell, performance.now(), this.gesture);
    const text = JSON.stringify(told);
    if (text !== this.text) {
      this.text = text;
      const lines = told.lines.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
      this.tip.replaceChildren(
        h("p", { class: "x-tip-title" }, h("i", { class: `x-ramp place-${told.letter}` }), told.title),
        h("dl", {}, ...lines),
        h("p", { class: "x-tip-action" }, told.action),
      );
    }
    this.place(this.map.boxOf(cell));
  }

  place({ x, y, w, h: height }) {
    const { style } = this.ring;
    style.transform = `translate(${x - 2}px, ${y - 2}px)`;
    style.width = `${w + 4}px`;
    style.height = `${height + 4}px`;
    const room = this.room.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.tip;
    const left = Math.max(0, Math.min(room.width - offsetWidth, x + w / 2 - offsetWidth / 2));
    const fitsBelow = room.top + y + height + MARGIN + offsetHeight < window.innerHeight;
    const top = fitsBelow ? y + height + MARGIN : y - MARGIN - offsetHeight;
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
}
