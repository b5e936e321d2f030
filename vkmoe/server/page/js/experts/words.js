// Says in plain words what the map shows of an expert.

const PLACES = {
  d: "On the device",
  h: "In host memory",
  f: "In the model file only",
  c: "Computed by the CPU",
};
const MEANING = {
  d: "the fastest place",
  h: "a token that needs it reads it over the link",
  f: "it is read from disk before a token can use it",
  c: "its weights stay in host memory",
};
const REASONS = {
  missed: "a token needed it and did not find it there",
  guessed: "it is expected to be needed soon",
  landed: "it was kept as it was read over the link",
  pinned: "it was pinned",
  "given back": "other programs need the memory",
  "fewer slots": "fewer slots are in use",
};

/**
 * Name a place.
 * @param {string} letter d, h, f or c
 */
export const placeName = (letter) => PLACES[letter] ?? letter;

/**
 * Explain an expert in plain words.
 * @param {import("./state.js").ExpertState} state
 * @param {{layer: number, expert: number}} cell
 * @param {number} now in milliseconds, by the clock of the state's moves
 * @param {string} gesture such as "Click", which pins and unpins
 * @returns {{title: string, letter: string, lines: [string, string][], action: string}}
 *   each line has a name and a text
 */
export function explain(state, { layer, expert }, now, gesture = "Click") {
  const key = layer * state.nExperts + expert;
  const letter = String.fromCharCode(state.places[key]);
  const move = state.moves.get(key);
  const isPinned = state.pinned[key] === 1;
  const lines = [
    ["Place", `${PLACES[letter]}: ${MEANING[letter]}`],
    ["Heat", heatText(state.heat[key])],
    ["Last move", move ? moveText(state, move, now) : "none that this page saw"],
  ];
  return {
    title: `Layer ${state.info.layers[layer]}, expert ${expert}`,
    letter,
    lines,
    action: actionText(state, isPinned, letter, gesture),
  };
}

/**
 * Write a number of bytes with its unit.
 * @param {number} bytes
 */
export function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 99.5 || unit === 0 ? Math.round(value) : value.toPrecision(2)} ${units[unit]}`;
}

function heatText(heat) {
  const share = Math.round((100 * heat) / 255);
  if (heat === 0) return "cold: not used of late";
  const word = heat < 40 ? "cool" : heat < 128 ? "warm" : "hot";
  return heat === 255 ? "hot: the most used of all" : `${word}: ${share} % of the most used`;
}

function moveText(state, { place, why, at }, now) {
  const to = { d: "to the device", h: "to host memory", f: "out of memory", c: "to the CPU" }[place];
  const evicted = /^evicted for (\d+)(?: of layer (\d+))?$/.exec(why);
  let reason = REASONS[why];
  if (evicted) {
    const where = evicted[2] === undefined ? "" : ` of layer ${state.info.layers[evicted[2]]}`;
    reason = `expert ${evicted[1]}${where} has its place now`;
  }
  return `${to} ${agoText(now - at)}${reason ? `: ${reason}` : ""}`;
}

function agoText(ms) {
  const seconds = Math.round(ms / 1000);
  if (seconds < 2) return "just now";
  return seconds < 100 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
}

function actionText(state, isPinned, letter, gesture) {
  if (state.info.cannot_change) return `It cannot be pinned: ${state.info.cannot_change.reason}.`;
  if (!isPinned) return `${gesture} to pin it: it then keeps a slot on the device.`;
  const waits = letter === "d" ? "" : " and gets its slot when a token has run";
  return `Pinned${waits}. ${gesture} to unpin it.`;
}
