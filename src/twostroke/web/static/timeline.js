// The timeline of steps as a part of a view: the canvas, its details by pointer and by keyboard.

import { Canvas } from "./canvas.js";
import { html, useEffect, useMemo, useRef, useState } from "./dom.js";
import { StepDetails } from "./step_details.js";
import { stepSentence } from "./step_words.js";
import { layout, makeScale, paintTimeline, visible } from "./timeline_paint.js";

const FAR = 1e9; // steps: to the first of all, or to the latest that is seen

function Timeline({ history, player, height = 280, columnWidth = 9, isRoot = false, byPhase = false, details = true }) {
  const place = useRef(null);
  const scale = useMemo(makeScale, [isRoot]);
  const [selected, setSelected] = useState(null); // the number of a step since the history began
  const [hovered, setHovered] = useState(null);
  const shown = hovered ?? selected;
  const scene = () => ({
    history,
    cursor_s: player.cursor_s(),
    columnWidth,
    isRoot,
    byPhase,
    scale,
    target_s: history.hello ? history.hello.itl_target_s : null,
    hasDrafts: history.draftsSeen,
    selected: shown,
  });
  const revision = () =>
    [history.firstStep, history.stepsUntil(player.cursor_s()), shown, columnWidth, isRoot, byPhase, history.draftsSeen]
      .concat(scale.isMoving ? performance.now() : [], history.hello?.now_s ?? [])
      .join(" ");
  const paint = (context, width, tall) => paintTimeline(context, width, tall, scene());

  const sight = () => {
    const box = place.current.getBoundingClientRect();
    const spots = layout(box.width, box.height, scene());
    return { box, spots, ...visible(history, player.cursor_s(), spots.columns) };
  };
  const numberAt = (event) => {
    const { box, spots, first, end } = sight();
    const index = end - Math.ceil((spots.right - (event.clientX - box.left)) / columnWidth);
    return index >= first && index < end ? index + history.firstStep : null;
  };
  const move = (by) => {
    const { steps, firstStep } = history;
    const { first, end, spots } = sight();
    if (!end) return;
    if (player.mode === "live") player.hold();
    const from = selected === null ? end - 1 - by : selected - firstStep;
    const last = Math.abs(by) === FAR ? end - 1 : steps.length - 1; // the end is that of what is seen
    const next = Math.min(Math.max(from + by, 0), last);
    if (next < first) player.seek(steps[Math.min(next + spots.columns, end) - 1].done_s);
    if (next >= end) player.seek(steps[next].done_s);
    setSelected(next + firstStep);
    setHovered(null);
  };
  const onKeyDown = (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -FAR, End: FAR };
    if (event.key === "Escape") setSelected(null);
    else if (event.key in moves) move(moves[event.key]);
    else return;
    event.preventDefault();
  };
  useEffect(() => {
    setSelected(null);
    setHovered(null);
  }, [history.hello]);

  const step = shown === null ? null : history.steps[shown - history.firstStep] || null;
  const label = "Steps of the engine as columns, height is time. Left and right arrow keys choose a step.";
  return html`
    <div class="timeline">
      <div
        ref=${place}
        class="plot"
        tabindex="0"
        role="slider"
        aria-label=${label}
        aria-valuemin=${history.firstStep}
        aria-valuemax=${Math.max(history.firstStep, history.firstStep + history.steps.length - 1)}
        aria-valuenow=${shown ?? Math.max(history.firstStep, history.firstStep + history.steps.length - 1)}
        aria-valuetext=${step ? stepSentence(step) : "no step chosen"}
        onPointerMove=${(event) => setHovered(numberAt(event))}
        onPointerLeave=${() => setHovered(null)}
        onClick=${(event) => setSelected(numberAt(event))}
        onKeyDown=${onKeyDown}
      >
        <${Canvas} paint=${paint} revision=${revision} height=${height} />
      </div>
      ${details && html`<${StepDetails} step=${step} history=${history} />`}
    </div>
  `;
}

export { Timeline };
