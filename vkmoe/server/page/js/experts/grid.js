// Says where the cells of the map lie on the canvas: layers downwards, experts to the right.

const MOST_HEIGHT = 336; // of all cells, in CSS pixels
const MOST_CELL = 30; // width and height
const LEAST_CELL = 2; // height
const TALLEST = 2.2; // times as high as wide, at most
const LABELS = 26; // room left of the cells
const AXIS = 18; // room above them

/**
 * @typedef {object} Grid
 * @property {number} ratio device pixels of a CSS pixel
 * @property {number} width of the canvas in CSS pixels
 * @property {number} height of the canvas in CSS pixels
 * @property {Int32Array} xs edges of the columns in device pixels [experts + 1]
 * @property {Int32Array} ys edges of the rows in device pixels [layers + 1]
 * @property {number} gap device pixels between two cells
 */

/**
 * Lay out the cells; where they get small there are no gaps between them.
 * @param {number} nLayers
 * @param {number} nExperts
 * @param {number} width of the canvas in CSS pixels
 * @param {number} ratio device pixels of a CSS pixel
 * @returns {Grid}
 */
export function layOut(nLayers, nExperts, width, ratio) {
  const room = Math.max(1, width - LABELS);
  const cellWidth = Math.min(room / nExperts, MOST_CELL * 1.6);
  const share = Math.min(MOST_HEIGHT / nLayers, MOST_CELL);
  const cellHeight = Math.max(LEAST_CELL, Math.min(share, cellWidth * TALLEST));
  const smaller = Math.min(cellWidth, cellHeight);
  const gap = smaller < 3.5 ? 0 : Math.round((smaller < 14 ? 1 : 2) * ratio);
  const edges = (n, first, size) =>
    Int32Array.from({ length: n + 1 }, (_, i) => Math.round((first + i * size) * ratio));
  return {
    ratio,
    width,
    height: Math.ceil(AXIS + nLayers * cellHeight),
    xs: edges(nExperts, LABELS, cellWidth),
    ys: edges(nLayers, AXIS, cellHeight),
    gap,
  };
}

/**
 * Return the rectangle of a cell in device pixels; it is at least one pixel large.
 * @param {Grid} grid
 * @param {number} layer
 * @param {number} expert
 * @returns {{x: number, y: number, w: number, h: number}}
 */
export function cellAt({ xs, ys, gap }, layer, expert) {
  const x = xs[expert];
  const y = ys[layer];
  return {
    x,
    y,
    w: Math.max(1, xs[expert + 1] - x - gap),
    h: Math.max(1, ys[layer + 1] - y - gap),
  };
}

/**
 * Find the cell at a point in CSS pixels; null beside the cells.
 * @param {Grid} grid
 * @param {number} x
 * @param {number} y
 * @returns {{layer: number, expert: number} | null}
 */
export function cellUnder({ xs, ys, ratio }, x, y) {
  const expert = between(xs, x * ratio);
  const layer = between(ys, y * ratio);
  return expert < 0 || layer < 0 ? null : { layer, expert };
}

/**
 * Choose which of n rows or columns get a label, so that labels stay apart.
 * @param {Int32Array} edges
 * @param {number} apart least distance in device pixels
 * @returns {number[]}
 */
export function labelled(edges, apart) {
  const n = edges.length - 1;
  const size = (edges[n] - edges[0]) / n;
  const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256];
  const step = steps.find((each) => each * size >= apart) ?? n;
  return Array.from({ length: Math.ceil(n / step) }, (_, i) => i * step);
}

function between(edges, at) {
  if (at < edges[0] || at >= edges[edges.length - 1]) return -1;
  let low = 0;
  let high = edges.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle] <= at) low = middle;
    else high = middle;
  }
  return low;
}
