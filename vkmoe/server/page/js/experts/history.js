// Keeps what was counted in each of the last seconds, from totals that only grow.

export const SECONDS = 90;
export const WAYS = ["read_through", "copied", "landed", "computed_by_cpu", "read_from_file"];

/**
 * @typedef {object} Second
 * @property {number | null} rate share of uses that were hits; null where nothing ran
 * @property {Record<string, number>} bytes a second, by way
 * @property {number} tokens that went through the layers, a second
 */

/** Turns totals into seconds; the oldest is forgotten. */
export class History {
  constructor() {
    /** @type {Second[]} */
    this.seconds = [];
    this.known = null;
  }

  /** @returns {boolean} whether anything happened in the time that is kept */
  get isQuiet() {
    return this.seconds.every(({ rate, bytes }) => rate === null && !sum(bytes));
  }

  /**
   * Add what came since the last call.
   * @param {any} info with hits and bytes as the server counts them, since the model was loaded
   * @param {number} usesPerToken of all layers
   * @param {number} now in milliseconds
   */
  add(info, usesPerToken, now) {
    const { uses, hits } = info.hits.total;
    const before = this.known;
    this.known = { uses, hits, bytes: info.bytes, now };
    if (!before || now - before.now < 1) return;
    const seconds = (now - before.now) / 1000;
    // A server that began anew counts from 0: nothing is known of that second.
    const nUses = Math.max(0, uses - before.uses);
    const bytes = {};
    for (const way of WAYS) {
      bytes[way] = Math.max(0, (info.bytes[way] ?? 0) - (before.bytes[way] ?? 0)) / seconds;
    }
    this.seconds.push({
      rate: nUses ? Math.min(1, Math.max(0, hits - before.hits) / nUses) : null,
      bytes,
      tokens: usesPerToken ? nUses / usesPerToken / seconds : 0,
    });
    if (this.seconds.length > SECONDS) this.seconds.shift();
  }

  /** Forget the totals, as the time until the next ones is not known to be quiet. */
  pause() {
    this.known = null;
  }
}

/** @param {Record<string, number>} bytes */
export function sum(bytes) {
  return Object.values(bytes).reduce((total, each) => total + each, 0);
}
