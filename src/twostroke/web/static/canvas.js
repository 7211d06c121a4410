// A canvas that is as sharp as the screen, as wide as its place, and drawn in the page's one animation loop, and then
// only when what it shows has changed.

import { onFrame } from "./frames.js";
import { html, useEffect, useRef } from "./dom.js";
import { theme } from "./colours.js";

/** `paint(context, width, height)` draws; `revision()` says what was drawn: the same value twice is not drawn twice. */
function Canvas({ paint, revision, height }) {
  const canvas = useRef(null);
  const current = useRef({});
  current.current = { paint, revision };
  useEffect(() => {
    const element = canvas.current;
    const context = element.getContext("2d");
    let drawn = null;
    let size = "";
    let [width, tall] = [0, 0]; // asked for when they change: asking in every frame would lay the page out in every frame
    const watcher = new ResizeObserver(() => {
      [width, tall] = [element.clientWidth, element.clientHeight];
    });
    watcher.observe(element);
    const stop = onFrame((elapsed_s) => {
      if (!width) return; // it is in a view that is hidden
      const density = window.devicePixelRatio || 1;
      const nextSize = `${width} ${tall} ${density}`;
      const { paint: draw, revision: version } = current.current;
      const next = version(elapsed_s);
      if (next === drawn && nextSize === size && theme() === element.themed) return;
      if (nextSize !== size) {
        element.width = Math.round(width * density);
        element.height = Math.round(tall * density);
      }
      drawn = next;
      size = nextSize;
      element.themed = theme();
      context.setTransform(density, 0, 0, density, 0, 0);
      context.clearRect(0, 0, width, tall);
      draw(context, width, tall);
    });
    return () => {
      watcher.disconnect();
      stop();
    };
  }, []);
  return html`<canvas ref=${canvas} aria-hidden="true" style=${{ height: `${height}px` }}></canvas>`;
}

const patterns = new Map();

/** Diagonal lines to lay over a fill: what a colour says, said once more. */
function hatch(context, colour, gap = 5) {
  const name = `${colour} ${gap}`;
  if (patterns.has(name)) return patterns.get(name);
  const tile = document.createElement("canvas");
  tile.width = gap;
  tile.height = gap;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.2;
  pen.beginPath();
  pen.moveTo(-1, gap + 1);
  pen.lineTo(gap + 1, -1);
  pen.moveTo(-1, 1);
  pen.lineTo(1, -1);
  pen.moveTo(gap - 1, gap + 1);
  pen.lineTo(gap + 1, gap - 1);
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  patterns.set(name, pattern);
  return pattern;
}

/** Round numbers from 0 to `most`, about `wanted` of them. */
function ticks(most, wanted = 4) {
  if (!(most > 0)) return [0];
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const values = [];
  for (let index = 0; index * step <= most * 1.0001; index += 1) values.push(index * step);
  return values;
}

export { Canvas, hatch, ticks };
