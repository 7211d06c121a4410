// The block map: one cell a block, or a few blocks where there are very many, found by pointer and by keyboard. Each tier
// is a band of its own.

import { BANDS, ORDER, STATE_WORDS, sizeOf } from "./block_bands.js";
import { Canvas, hatch } from "./canvas.js";
import { requestColour, theme } from "./colours.js";
import { html, useLayoutEffect, useRef, useState } from "./dom.js";
import { count } from "./units.js";

const CELLS_MOST = 6000;
const SIZES = [22, 18, 15, 12, 10, 8, 7, 6, 5];
const TALLEST = { device: 420, host: 180, disk: 100 };
const LEAST_SHOWN = { device: 200, host: 100, disk: 0 };

/** How blocks become cells in this width: how many a cell, how large, how many in a row. */
function gridOf(blocks, width, all, tallest) {
  const each = Math.max(1, Math.ceil(blocks / CELLS_MOST));
  let cells = Math.ceil(blocks / each);
  for (const size of SIZES) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(cells / columns);
    if (rows * size > tallest && size !== SIZES.at(-1)) continue;
    cells = Math.min(rows * columns, Math.ceil(all / each)); // the last row is full, if there are blocks for it
    return { each, cells, size, columns, rows };
  }
  return null;
}

/** All blocks, or those from the first up to a little beyond the last that was ever in use. */
function blocksShown(history, map, band, group, isWhole) {
  const all = sizeOf(BANDS[band].runsOf(map, group));
  const touched = Math.max(history.touched[`${band} ${group}`] || 0, LEAST_SHOWN[band]);
  return { all, shown: isWhole ? all : Math.min(all, 2 ** Math.ceil(Math.log2(touched * 1.05))) };
}

/** Each cell's state and request; of several blocks in a cell the one that is most in use counts. */
function cellsOf(runs, grid) {
  const cells = new Array(grid.cells).fill(null);
  for (const [first, number, state, request] of runs) {
    const until = Math.min(Math.floor((first + number - 1) / grid.each), grid.cells - 1);
    for (let cell = Math.floor(first / grid.each); cell <= until; cell += 1) {
      if (!cells[cell] || ORDER.indexOf(state) < ORDER.indexOf(cells[cell].state)) cells[cell] = { state, request };
    }
  }
  return cells;
}

function paintMap(context, grid, cells, chosen) {
  const colours = theme();
  const inner = grid.size - (grid.size > 8 ? 2 : 1);
  cells.forEach((cell, index) => {
    const x = (index % grid.columns) * grid.size;
    const y = Math.floor(index / grid.columns) * grid.size;
    paintCell(context, cell || { state: "free" }, x, y, inner, colours);
  });
  if (chosen !== null && chosen < cells.length) {
    const x = (chosen % grid.columns) * grid.size;
    const y = Math.floor(chosen / grid.columns) * grid.size;
    context.strokeStyle = colours.focus;
    context.lineWidth = 2;
    context.strokeRect(x, y, inner, inner);
  }
}

function paintCell(context, cell, x, y, inner, colours) {
  if (cell.state === "free") {
    context.fillStyle = colours.free;
    context.fillRect(x, y, inner, inner);
    return;
  }
  if (cell.state === "cached") {
    context.fillStyle = colours.kept;
    context.fillRect(x, y, inner, inner);
    context.fillStyle = hatch(context, colours.surface, 4);
    context.fillRect(x, y, inner, inner);
    return;
  }
  if (!(cell.state === "used" || cell.state === "shared")) {
    paintKept(context, cell.state, x, y, inner, colours);
    return;
  }
  context.fillStyle = requestColour(cell.request);
  context.fillRect(x, y, inner, inner);
  if (cell.state === "shared") {
    const dot = Math.max(2, Math.floor(inner / 3));
    context.fillStyle = colours.surface;
    context.fillRect(x + (inner - dot) / 2, y + (inner - dot) / 2, dot, dot);
  }
}

/** Beyond the device: a frame in host memory, filled from below where disk has it, too; on its way, a dot in it. */
function paintKept(context, state, x, y, inner, colours) {
  context.fillStyle = colours.kept;
  if (state === "disk") {
    context.fillRect(x, y, inner, inner);
    return;
  }
  const line = inner > 8 ? 2 : 1;
  context.fillRect(x, y, inner, inner);
  context.fillStyle = colours.surface;
  const hollow = inner - 2 * line;
  context.fillRect(x + line, y + line, hollow, state === "written" ? Math.floor(hollow / 2) : hollow);
  if (state !== "moving") return;
  const dot = Math.max(2, Math.floor(inner / 3));
  context.fillStyle = colours.ink;
  context.fillRect(x + (inner - dot) / 2, y + (inner - dot) / 2, dot, dot);
}

function BlockMap({ history, player, band, group, isWhole }) {
  const place = useRef(null);
  const [chosen, setChosen] = useState(null);
  const [width, setWidth] = useState(900);
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(() => setWidth(place.current?.clientWidth || 900));
    watcher.observe(place.current);
    return () => watcher.disconnect();
  }, []);
  const map = history.mapAt(player.cursor_s());
  const { shown, all } = map ? blocksShown(history, map, band, group, isWhole) : { shown: 0, all: 0 };
  const grid = gridOf(shown, width, all, TALLEST[band]);
  const paint = (context) => {
    const now = history.mapAt(player.cursor_s());
    if (now) paintMap(context, grid, cellsOf(BANDS[band].runsOf(now, group), grid), chosen);
  };
  const cellAt = (event) => {
    const box = place.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / grid.size);
    const cell = Math.floor((event.clientY - box.top) / grid.size) * grid.columns + column;
    return column < grid.columns && cell >= 0 && cell < grid.cells ? cell : null;
  };
  const onKeyDown = (event) => {
    const moves = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -grid.columns,
      ArrowDown: grid.columns,
      Home: -1e9,
      End: 1e9,
    };
    if (event.key === "Escape") setChosen(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    setChosen((cell) => Math.min(Math.max((cell ?? -1) + moves[event.key], 0), grid.cells - 1));
  };
  const cell = chosen === null || !map ? null : cellsOf(BANDS[band].runsOf(map, group), grid)[chosen];
  const words = chosen === null || !map ? "" : cellWords(cell, chosen, grid, band);
  return html`<div class="map">
    <div ref=${place} class="plot" tabindex="0" role="slider"
      aria-label="Blocks of the KV cache ${BANDS[band].title.toLowerCase()}. Arrow keys choose one."
      aria-valuemin="0" aria-valuemax=${Math.max(grid.cells - 1, 0)} aria-valuenow=${chosen ?? 0}
      aria-valuetext=${words || "no block chosen"}
      onPointerMove=${(event) => setChosen(cellAt(event))} onPointerDown=${(event) => setChosen(cellAt(event))}
      onPointerLeave=${(event) => event.pointerType === "mouse" && setChosen(null)} onKeyDown=${onKeyDown}>
      <${Canvas} paint=${paint} height=${Math.max(grid.rows * grid.size, grid.size)}
        revision=${() => `${history.mapAt(player.cursor_s())?.at_s} ${chosen} ${group} ${grid.cells} ${width}`} />
    </div>
    <p class="map-words">${words || `${HINTS[band]}${gridWords(grid, all)}`}</p>
  </div>`;
}

const HINTS = {
  device: "Point at a block or tap it, or focus the map and use the arrow keys.",
  host: "",
  disk: "One after the other: a folder has no places.",
};

function gridWords(grid, all) {
  const shown = grid.cells * grid.each;
  const each = grid.each > 1 ? ` A cell is ${grid.each} blocks.` : "";
  return shown < all
    ? `${each} Shown are the first ${count(shown)} of ${count(all)}: no later one was in use yet.`
    : each;
}

function cellWords(cell, index, grid, band) {
  const from = index * grid.each;
  const name = `${BANDS[band].cell} ${count(from)}${grid.each === 1 ? "" : `–${count(from + grid.each - 1)}`}`;
  if (!cell) return `${name}: free`;
  const owner = cell.state === "used" || cell.state === "shared" ? ` request #${cell.request}` : "";
  return `${name}: ${STATE_WORDS[cell.state]}${owner}`;
}

export { BlockMap };
