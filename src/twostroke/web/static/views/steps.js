// Steps: a live timeline of what the engine does, and single-stepping of an engine that is otherwise idle.

import { html, useRevision, useState } from "../dom.js";
import { Empty } from "../empty.js";
import { Legend } from "../legend.js";
import { SingleStepping } from "../single_stepping.js";
import { Timeline } from "../timeline.js";

const NARROW = 600; // pixels: on a phone columns are narrower, or a handful would fill it
const LEGEND = [
  ["swatch-decode", "decode slots: one token each, plain"],
  ["swatch-prefill", "prefill chunks: part of a prompt, hatched"],
  ["swatch-rejected", "pale: drafts that were rejected"],
  ["swatch-predicted", "predicted time"],
  ["swatch-target", "ITL target"],
];

function StepsView({ source, mayAct }) {
  const { history, player } = source;
  useRevision(() => `${history.isEmpty} ${history.hello?.itl_target_s} ${history.draftsSeen}`, 4);
  const [columnWidth, setColumnWidth] = useState(() => (innerWidth < NARROW ? 6 : 10));
  const [isRoot, setIsRoot] = useState(false);
  const [byPhase, setByPhase] = useState(false);
  const hello = history.hello;
  const rows = LEGEND.filter(
    ([name]) => (name !== "swatch-target" || hello?.itl_target_s) && (name !== "swatch-rejected" || history.draftsSeen),
  );
  return html`
    <div class="card">
      <div class="card-head">
        <div>
          <h2>Steps</h2>
          <p class="lead">Each column is one step of the engine. Its height is the time it took.</p>
        </div>
        <div class="controls">
          <label>Width <input type="range" min="3" max="28" value=${columnWidth}
            onInput=${(event) => setColumnWidth(Number(event.target.value))} /></label>
          <label>Height <select onChange=${(event) => setIsRoot(event.target.value === "root")}>
            <option value="linear" selected=${!isRoot}>linear</option>
            <option value="root" selected=${isRoot}>square root</option>
          </select></label>
          <label>Colour <select onChange=${(event) => setByPhase(event.target.value === "phase")}>
            <option value="request" selected=${!byPhase}>by request</option>
            <option value="phase" selected=${byPhase}>by phase</option>
          </select></label>
        </div>
      </div>
      ${
        history.isEmpty
          ? html`<${Empty} title="No step yet" mayAct=${mayAct}>
            The engine steps when there is something to do. Ask it something: its prompt is read in one tall column, then
            its answer is written, one short column a token.
          <//>`
          : html`<${Timeline} history=${history} player=${player} columnWidth=${columnWidth} isRoot=${isRoot}
            byPhase=${byPhase} height=${300} />`
      }
      <${Legend} rows=${rows} />
    </div>
    ${mayAct && source.kind === "live" && html`<${SingleStepping} source=${source} />`}
  `;
}

export { StepsView };
