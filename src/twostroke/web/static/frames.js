// One animation loop for the whole page: whoever draws is called once a frame, and nothing else draws.

const drawers = new Set();
let last_ms = null;

function frame(now_ms) {
  const elapsed_s = last_ms === null ? 0 : Math.min((now_ms - last_ms) / 1000, 0.25);
  last_ms = now_ms;
  for (const draw of drawers) draw(elapsed_s);
  if (drawers.size) requestAnimationFrame(frame);
  else last_ms = null;
}

/** Returns what stops it. */
function onFrame(draw) {
  drawers.add(draw);
  if (drawers.size === 1) requestAnimationFrame(frame);
  return () => drawers.delete(draw);
}

export { onFrame };
