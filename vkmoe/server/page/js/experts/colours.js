// Reads the map's colours from CSS variables, and mixes those of a place by heat.

const LEVELS = 24; // of heat that are told apart
const PLACES = { d: "device", h: "host", f: "file", c: "cpu" };
const FLASHES = ["hit", "miss", "in", "out"];

/**
 * @typedef {object} Colours
 * @property {Record<number, string[]>} cells a colour for each level, by the code of a place's letter
 * @property {Record<string, string>} flashes by kind
 * @property {string} pin
 * @property {string} text of labels
 * @property {string} line
 * @property {(name: string) => string} of returns the value of any variable
 */

/**
 * Read the colours that hold for an element now.
 * @param {Element} element
 * @returns {Colours}
 */
export function readColours(element) {
  const style = getComputedStyle(element);
  const of = (name) => style.getPropertyValue(name).trim();
  const cells = {};
  for (const [letter, name] of Object.entries(PLACES)) {
    const cold = parse(of(`--map-${name}-cold`));
    const hot = parse(of(`--map-${name}-hot`));
    cells[letter.charCodeAt(0)] = Array.from({ length: LEVELS }, (_, level) =>
      mix(cold, hot, level / (LEVELS - 1)),
    );
  }
  const flashes = Object.fromEntries(FLASHES.map((kind) => [kind, of(`--map-${kind}`)]));
  return { cells, flashes, pin: of("--map-pin"), text: of("--muted"), line: of("--line"), of };
}

/**
 * Return the level of a heat: steps are finer where it is cold, as most experts are.
 * @param {number} heat 0 to 255
 */
export function levelOf(heat) {
  return Math.round(Math.sqrt(heat / 255) * (LEVELS - 1));
}

/** @param {string} text such as "#3452d1" */
function parse(text) {
  const value = Number.parseInt(text.slice(1), 16) || 0;
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function mix(cold, hot, share) {
  const parts = cold.map((each, i) => Math.round(each + (hot[i] - each) * share));
  return `rgb(${parts.join(" ")})`;
}
