// Watches the server: whether its model is there, and what it is.

import * as api from "./api.js";

const READY_MS = 15_000; // between two questions while all is well
const LOADING_MS = 700;
const LOST_MS = 2_000;
const PATIENCE_MS = 10_000; // for an answer of /health

/**
 * @typedef {object} State
 * @property {"asking" | "ready" | "loading" | "failed" | "lost" | "locked"} name
 * @property {string} text what the server said
 * @property {any} props of a model that is there: the answer of /props
 */

/** Asks /health in turns; tells listeners of each change. */
export class ServerState extends EventTarget {
  /** @type {State} */
  now = { name: "asking", text: "", props: null };
  #timer = 0;
  #isAsking = false;

  /** Begin to ask. */
  start() {
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.look();
    });
    this.look();
  }

  /** Ask at once, for example after an error. */
  async look() {
    if (this.#isAsking) return;
    this.#isAsking = true;
    clearTimeout(this.#timer);
    const found = await this.#found();
    this.#isAsking = false;
    const { name, text } = this.now;
    this.now = found;
    if (found.name !== name || found.text !== text) this.dispatchEvent(new Event("change"));
    const wait = { ready: READY_MS, loading: LOADING_MS }[found.name] ?? LOST_MS;
    if (found.name !== "locked" && !document.hidden) {
      this.#timer = setTimeout(() => this.look(), wait);
    }
  }

  /** @returns {Promise<State>} */
  async #found() {
    try {
      await api.getJson("/health", { signal: AbortSignal.timeout(PATIENCE_MS) });
      const props = this.now.name === "ready" ? this.now.props : await api.getJson("/props");
      return { name: "ready", text: "", props };
    } catch (error) {
      const text = error.message;
      const { props } = this.now;
      if (error.status === 401) return { name: "locked", text, props };
      if (error.status !== 503) return { name: "lost", text, props };
      const isLoading = text.startsWith("Loading");
      return { name: isLoading ? "loading" : "failed", text, props };
    }
  }
}
