// Says where the time of the last tokens went: a sentence, and a bar of its parts.

import { h } from "../dom.js";

const NAMES = {
  compute: "computing",
  cpu: "CPU experts",
  link: "link",
  file: "file",
  copies: "copies",
  host: "host",
};
const LEAST = 0.004; // share of a part that is worth a place in the bar

/** Shows the server's answer to "why does a token take so long". */
export class Why {
  constructor() {
    this.sentence = h("p", { class: "x-sentence" });
    this.bar = h("div", { class: "x-bar x-bar-tall", "aria-hidden": "true" });
    this.legend = h("ul", { class: "x-legend" });
    this.head = h("span", { class: "x-value" });
    this.element = h(
      "section",
      { class: "x-card x-why", "aria-label": "Where time goes" },
      h("div", { class: "x-chart-head" }, h("h3", {}, "Where a token's time goes"), this.head),
      this.bar,
      this.legend,
      this.sentence,
    );
  }

  /** @param {any} answer of GET /why */
  show(answer) {
    const text = [answer.sentence, ...answer.unknown.map(capital)].join(" ");
    this.sentence.replaceChildren(...withCode(text));
    const ms = answer.ms_per_token;
    this.head.textContent = ms === null ? "" : `${ms < 9.95 ? ms.toPrecision(2) : Math.round(ms)} ms`;
    const parts = Object.entries(answer.parts).filter(([, { share }]) => share >= LEAST);
    this.bar.hidden = this.legend.hidden = !parts.length;
    const bars = parts.map(([name, { share }]) => {
      const bar = h("i", { class: `x-part part-${name}` });
      bar.style.flexGrow = share;
      return bar;
    });
    this.bar.replaceChildren(...bars);
    const items = parts.map(([name, { share, how }]) =>
      h(
        "li",
        { title: how },
        h("i", { class: `x-swatch part-${name}` }),
        `${NAMES[name] ?? name} `,
        h("strong", {}, `${Math.round(100 * share)} %`),
      ),
    );
    this.legend.replaceChildren(...items);
  }
}

/** Return the pieces of a text; those between backticks are code. */
function withCode(text) {
  const pieces = text.split("`");
  return pieces.map((piece, i) => (i % 2 ? h("code", {}, piece) : piece));
}

function capital(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}
