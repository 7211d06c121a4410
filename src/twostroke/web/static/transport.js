// Which moment is looked at: pause, scrub, slow motion, one step back or on. It moves the view; the engine goes on.

import { html, useRevision } from "./dom.js";
import { clock } from "./units.js";

const RATES = [
  [1, "real time"],
  [0.25, "slow: 1/4"],
  [0.05, "slow: 1/20"],
  [0.01, "slow: 1/100"],
];

function Transport({ source }) {
  const { history, player } = source;
  useRevision(() => `${history.revision} ${player.revision} ${player.mode === "live" || player.cursor_s()}`, 6);
  const isLive = player.mode === "live";
  const isHeld = player.mode === "held";
  const oldest_s = history.oldest_s;
  const behind_s = isLive ? 0 : history.now_s() - player.cursor_s();
  const span_s = Math.max(history.now_s() - oldest_s, 0);
  const toggle = () => {
    if (!isHeld) player.hold();
    else if (player.isLive && player.rate === 1 && behind_s < 0.5) player.goLive();
    else player.play();
  };
  return html`<div class="transport" role="group" aria-label="The moment that is looked at">
    <button type="button" class="primary" onClick=${toggle}>${isHeld ? "Play" : "Pause the view"}</button>
    <button type="button" onClick=${() => player.nudge(-1)} aria-label="One step back" title="One step back">◂</button>
    <button type="button" onClick=${() => player.nudge(1)} aria-label="One step on" title="One step on">▸</button>
    <label class="scrub">
      <span class="unseen">Moment</span>
      <input
        type="range"
        min="0"
        max=${span_s}
        step="any"
        value=${span_s - behind_s}
        aria-valuetext=${isLive ? "now" : `${clock(behind_s)} before the end`}
        onInput=${(event) => player.seek(oldest_s + Number(event.target.value))}
      />
    </label>
    <output class="moment">${moment(player, span_s, behind_s)}</output>
    <label class="pace"><span class="unseen">Pace</span>
      <select onChange=${(event) => player.setRate(Number(event.target.value))}>
        ${RATES.map(([rate, words]) => html`<option value=${rate} selected=${rate === player.rate}>${words}</option>`)}
      </select>
    </label>
    ${player.isLive && !isLive && html`<button type="button" onClick=${() => goLive(player)}>Back to now</button>`}
  </div>`;
}

function goLive(player) {
  player.rate = 1;
  player.goLive();
}

function moment(player, span_s, behind_s) {
  if (player.mode === "live") return "now";
  return player.isLive ? `−${clock(behind_s)}` : `${clock(span_s - behind_s)} / ${clock(span_s)}`;
}

export { Transport };
