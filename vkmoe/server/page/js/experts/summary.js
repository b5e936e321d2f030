// Says how many experts are where: a bar, and the legend of the map's colours under it.

import { h } from "../dom.js";
import { countPlaces } from "./state.js";
import { placeName } from "./words.js";

const SHORT = { d: "device", h: "host", f: "file", c: "CPU" };
const MARKS = [
  ["hit", "hit", "A token needed the expert and found it on the device"],
  ["miss", "miss", "A token needed the expert, and it was not on the device"],
  ["in", "moves in", "The expert gets a slot on the device"],
  ["out", "leaves", "The expert loses its slot"],
  ["pin", "pinned", "The expert keeps its slot"],
];

/** Shows a bar and a legend; places without experts are left out. */
export class Summary {
  constructor() {
    this.bar = h("div", { class: "x-bar", "aria-hidden": "true" });
    this.legend = h("ul", { class: "x-legend" });
    const marks = MARKS.map(([kind, name, title]) =>
      h("span", { class: "x-key", title }, h("i", { class: `x-mark mark-${kind}` }), name),
    );
    this.marks = h("div", { class: "x-marks", "aria-label": "What flashes" }, ...marks);
    this.element = h("div", { class: "x-summary" }, this.bar, this.legend);
    this.text = "";
  }

  /** @param {import("./state.js").ExpertState} state */
  show(state) {
    const counts = countPlaces(state);
    const text = JSON.stringify(counts);
    if (text === this.text) return;
    this.text = text;
    const letters = Object.keys(counts).filter((letter) => counts[letter]);
    const total = state.places.length;
    const parts = letters.map((letter) => {
      const part = h("i", { class: `x-part place-${letter}` });
      part.style.flexGrow = counts[letter];
      return part;
    });
    this.bar.replaceChildren(...parts);
    const items = letters.map((letter) =>
      h(
        "li",
        { title: placeName(letter) },
        h("i", { class: `x-ramp place-${letter}` }),
        h("strong", {}, counts[letter].toLocaleString("en")),
        ` ${SHORT[letter]} `,
        h("span", { class: "x-share" }, `${Math.round((100 * counts[letter]) / total)} %`),
      ),
    );
    this.legend.replaceChildren(...items);
  }
}
