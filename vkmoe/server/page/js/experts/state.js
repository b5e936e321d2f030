// Holds what is known of the experts: a snapshot of the server, and every delta put over it.

/** @typedef {"hit" | "miss" | "in" | "out"} FlashKind */

/**
 * @typedef {object} Move
 * @property {string} place the letter of where the expert went
 * @property {string} why as the server says it
 * @property {number} at when it was seen, in milliseconds of the caller's clock
 */

/**
 * @typedef {object} ExpertState
 * @property {any} info the snapshot with the deltas over it, but for what the fields below hold
 * @property {number} nLayers
 * @property {number} nExperts of each layer
 * @property {Uint8Array} places codes of the letters d, h, f, c, one for each expert [layer, expert]
 * @property {Uint8Array} heat 255 for the most used of all, alike
 * @property {Uint8Array} pinned 1 for experts that keep their slots, alike
 * @property {Map<number, Move>} moves the last move of each expert that was seen moving
 */

/**
 * @typedef {object} Change
 * @property {{key: number, kind: FlashKind}[]} flashes in the order of what happened
 * @property {boolean} heat whether the heat of experts changed
 * @property {boolean} settings whether slots, policy or pins changed
 */

const DEVICE = 100; // the code of the letter d

/**
 * Begin with a snapshot.
 * @param {any} snapshot
 * @returns {ExpertState}
 */
export function begin(snapshot) {
  const { places, heat, pinned, ...info } = snapshot;
  const nLayers = places.length;
  const nExperts = nLayers ? snapshot.n_experts : 0;
  const state = {
    info,
    nLayers,
    nExperts,
    places: new Uint8Array(nLayers * nExperts),
    heat: new Uint8Array(nLayers * nExperts),
    pinned: new Uint8Array(nLayers * nExperts),
    moves: new Map(),
  };
  places.forEach((row, layer) => {
    for (let e = 0; e < nExperts; e++) state.places[layer * nExperts + e] = row.charCodeAt(e);
  });
  putHeat(state, heat);
  putPins(state, pinned);
  return state;
}

/**
 * Put a delta over a state, which is changed.
 * @param {ExpertState} state
 * @param {any} delta
 * @param {number} now in milliseconds
 * @returns {Change}
 */
export function putOver(state, delta, now) {
  const { moves, uses, heat, pinned, ...rest } = delta;
  const flashes = [];
  for (const [layer, expert, hit] of uses ?? []) {
    flashes.push({ key: layer * state.nExperts + expert, kind: hit ? "hit" : "miss" });
  }
  for (const [layer, expert, place, why] of moves ?? []) {
    const key = layer * state.nExperts + expert;
    state.places[key] = place.charCodeAt(0);
    state.moves.set(key, { place, why, at: now });
    flashes.push({ key, kind: state.places[key] === DEVICE ? "in" : "out" });
  }
  if (heat) putHeat(state, heat);
  if (pinned) putPins(state, pinned);
  Object.assign(state.info, rest);
  return { flashes, heat: Boolean(heat), settings: Boolean(pinned) || "slots" in rest };
}

/**
 * Count the experts by the letter of their place.
 * @param {ExpertState} state
 * @returns {{d: number, h: number, f: number, c: number}}
 */
export function countPlaces(state) {
  const counts = { d: 0, h: 0, f: 0, c: 0 };
  for (const code of state.places) counts[String.fromCharCode(code)] += 1;
  return counts;
}

/**
 * List what is pinned.
 * @param {ExpertState} state
 * @returns {[number, number][]} layer and expert
 */
export function listPins(state) {
  const found = [];
  state.pinned.forEach((isPinned, key) => {
    if (isPinned) found.push([Math.floor(key / state.nExperts), key % state.nExperts]);
  });
  return found;
}

function putHeat(state, rows) {
  rows.forEach((row, layer) => {
    const bytes = atob(row);
    for (let e = 0; e < state.nExperts; e++) {
      state.heat[layer * state.nExperts + e] = bytes.charCodeAt(e);
    }
  });
}

function putPins(state, rows) {
  state.pinned.fill(0);
  rows.forEach((ids, layer) => {
    for (const expert of ids) state.pinned[layer * state.nExperts + expert] = 1;
  });
}
