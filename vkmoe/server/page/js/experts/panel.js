// Shows the experts' panel: the map, what was counted, where time goes, and what can be changed.

import { h } from "../dom.js";
import { Charts } from "./charts.js";
import { Connection } from "./connection.js";
import { Controls } from "./controls.js";
import { History } from "./history.js";
import { ExpertMap } from "./map.js";
import { Pointer } from "./pointer.js";
import { begin, putOver } from "./state.js";
import { Summary } from "./summary.js";
import { Why } from "./why.js";

const SECOND_MS = 1000;
const WHY_EVERY = 2; // seconds, while something runs
const STATES = {
  live: "live",
  paused: "paused",
  connecting: "connecting",
  reconnecting: "reconnecting",
  waiting: "waiting for the engine",
};

/**
 * Show what the experts do in an element.
 * @param {HTMLElement} element
 * @param {{getJson: Function, sendJson: Function, events: Function}} api
 * @returns {{pause: () => void, resume: () => void}} called when the panel is hidden, and shown
 */
export function mountExperts(element, api) {
  const panel = new Panel(element, api);
  panel.resume();
  return { pause: () => panel.pause(), resume: () => panel.resume() };
}

class Panel {
  constructor(element, api) {
    this.api = api;
    this.state = null;
    this.history = new History();
    this.summary = new Summary();
    this.charts = new Charts();
    this.why = new Why();
    this.controls = new Controls((change) => this.change(change));
    this.build(element);
    this.map = new ExpertMap(this.canvas);
    this.pointer = new Pointer(this.map, this.room, (layer, e) => this.toggle(layer, e));
    this.map.onlayout = () => this.pointer.show();
    this.connection = new Connection(
      api,
      (event, data) => this.take(event, data),
      (state, detail) => this.tell(state, detail),
    );
    this.isWanted = false;
    document.addEventListener("visibilitychange", () => this.follow());
    new MutationObserver(() => this.charts.draw(this.history.seconds)).observe(
      document.documentElement,
      { attributes: true, attributeFilter: ["data-theme"] },
    );
  }

  build(element) {
    const label = "Map of experts: layers downwards, experts to the right. Arrow keys choose one.";
    const asked = { tabIndex: 0, role: "application", "aria-label": label };
    this.canvas = h("canvas", { class: "x-canvas", "aria-describedby": "x-tip", ...asked });
    this.room = h("div", { class: "x-room" }, this.canvas);
    this.dot = h("i", { class: "x-dot" });
    this.stateText = h("span", {}, "connecting");
    this.line = h("span", { class: "x-state", role: "status" }, this.dot, this.stateText);
    this.facts = h("p", { class: "x-facts" });
    this.note = h("p", { class: "x-note", hidden: true });
    this.mapCard = h(
      "section",
      { class: "x-card x-map", hidden: true },
      this.summary.element,
      this.room,
      this.summary.marks,
    );
    const panel = h(
      "div",
      { class: "x-panel" },
      h("header", { class: "x-head" }, h("h2", {}, "Experts"), this.line, this.facts),
      this.note,
      this.mapCard,
      this.charts.element,
      this.why.element,
      this.controls.element,
    );
    element.replaceChildren(panel);
  }

  pause() {
    this.isWanted = false;
    this.follow();
  }

  resume() {
    this.isWanted = true;
    this.follow();
  }

  /** Ask the server only while the panel can be seen. */
  follow() {
    const isSeen = this.isWanted && !document.hidden;
    if (isSeen === this.connection.isOpen) return;
    if (isSeen) {
      this.connection.start();
      clearInterval(this.clock); // the connection may have ended by itself
      this.clock = setInterval(() => this.tick(), SECOND_MS);
    } else {
      this.connection.stop();
      this.history.pause();
      clearInterval(this.clock);
    }
  }

  tell(state, detail) {
    this.line.dataset.state = state;
    this.line.title = detail;
    this.stateText.textContent = STATES[state];
    if (!this.state) this.say(state === "reconnecting" ? detail : "");
    if (state === "reconnecting") this.history.pause();
  }

  say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  take(event, data) {
    if (event === "snapshot") return this.begin(data);
    if (event !== "delta" || !this.state) return;
    const change = putOver(this.state, data, performance.now());
    if (change.flashes.length || change.heat || change.settings) {
      this.map.update(change.flashes);
      this.summary.show(this.state);
      if (change.settings) this.controls.show(this.state);
      if (this.pointer.cell) this.pointer.show();
    }
  }

  begin(snapshot) {
    const before = this.state;
    this.state = begin(snapshot);
    // A move that was seen holds for the same model, where the expert still is where it went.
    for (const [key, move] of before?.moves ?? []) {
      const isThere = this.state.places[key] === move.place.charCodeAt(0);
      if (isThere && before.info.model === snapshot.model) this.state.moves.set(key, move);
    }
    const { info, nLayers } = this.state;
    const isDense = !nLayers;
    this.say(isDense ? `${capital(info.reason)}. There is no map to draw.` : "");
    this.mapCard.hidden = this.charts.element.hidden = this.controls.element.hidden = isDense;
    this.facts.title = isDense ? "" : capital(info.mode.why);
    this.facts.textContent = isDense ? info.model : factsText(info);
    if (!isDense) {
      this.map.show(this.state);
      this.summary.show(this.state);
      this.controls.show(this.state);
      this.charts.draw(this.history.seconds);
    }
    if (!before) void this.askWhy();
  }

  /** Count a second; where nothing ran in all that is shown, nothing is drawn. */
  tick() {
    if (!this.state || this.connection.state !== "live") return;
    const { info, nLayers } = this.state;
    const wasQuiet = this.history.isQuiet;
    this.history.add(info, nLayers * info.n_used, performance.now());
    if (!wasQuiet || !this.history.isQuiet) this.charts.draw(this.history.seconds);
    if (this.pointer.cell) this.pointer.show();
    this.nTicks = (this.nTicks ?? 0) + 1;
    const uses = nLayers ? info.hits.total.uses : this.nTicks;
    if (this.nTicks % WHY_EVERY === 0 && uses !== this.usesAsked) {
      this.usesAsked = uses;
      void this.askWhy();
    }
  }

  async askWhy() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      this.why.show(await this.api.getJson("/why"));
    } catch {
      // The stream breaks as well then, and its state says so.
    } finally {
      this.isAsking = false;
    }
  }

  async change(asked) {
    const { notes, ...inForce } = await this.api.sendJson("PATCH", "/experts", asked);
    putOver(this.state, inForce, performance.now());
    this.map.update([]);
    this.controls.show(this.state);
    this.pointer.show();
    return { notes };
  }

  toggle(layer, expert) {
    const { info, nExperts, pinned } = this.state;
    if (info.cannot_change) return;
    const name = pinned[layer * nExperts + expert] ? "unpin" : "pin";
    void this.controls.send({ [name]: [[layer, expert]] });
  }
}

function factsText({ layers, n_experts: n, n_used: nUsed, mode }) {
  const used = `${nUsed} used by a token`;
  return `${layers.length} layers × ${n} experts, ${used} · mode ${mode.name}`;
}

function capital(text) {
  return text ? text[0].toUpperCase() + text.slice(1) : "";
}
