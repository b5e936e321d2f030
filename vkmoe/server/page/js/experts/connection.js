// Keeps a stream of the experts open: begins it anew, later each time, where it breaks.

const FIRST_MS = 500;
const MOST_MS = 15_000;
const SILENT_MS = 3_000; // after which the engine counts as busy with something long

/** @typedef {"live" | "paused" | "reconnecting" | "waiting" | "connecting"} StateName */

/** Gives snapshots and deltas to `take`, and its own state to `tell`. */
export class Connection {
  /**
   * @param {{events: Function}} api
   * @param {(event: string, data: any) => void} take
   * @param {(state: StateName, detail: string) => void} tell
   */
  constructor(api, take, tell) {
    this.api = api;
    this.take = take;
    this.tell = tell;
    this.stopping = null;
    this.heard = 0;
    this.watch = 0;
  }

  get isOpen() {
    return this.stopping !== null;
  }

  start() {
    if (this.isOpen) return;
    this.stopping = new AbortController();
    this.watch = setInterval(() => {
      if (this.state === "live" && performance.now() - this.heard > SILENT_MS) this.say("waiting");
    }, 1000);
    void this.run(this.stopping.signal);
  }

  stop() {
    if (!this.isOpen) return;
    clearInterval(this.watch);
    this.stopping.abort();
    this.stopping = null;
    this.say("paused");
  }

  say(state, detail = "") {
    this.state = state;
    this.tell(state, detail);
  }

  async run(signal) {
    let pause = FIRST_MS;
    this.say("connecting");
    while (!signal.aborted) {
      let detail = "The stream ended.";
      try {
        for await (const { event, data } of this.api.events("/experts/stream?rate=10", { signal })) {
          if (signal.aborted) return;
          pause = FIRST_MS;
          this.heard = performance.now();
          if (this.state !== "live") this.say("live");
          this.take(event, data);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return this.stop(); // the user has no key, and was asked for one
        detail = error.message;
      }
      if (signal.aborted) return;
      this.say("reconnecting", detail);
      await sleep(pause * (0.8 + 0.4 * Math.random()), signal);
      pause = Math.min(MOST_MS, 2 * pause);
    }
  }
}

/** Wait, or until the signal. */
function sleep(ms, signal) {
  return new Promise((done) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      done();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}
