// KV: the block map, how full the cache is and how often it hits over time, its tiers, and where prefixes broke.

import { BANDS, bandsOf, totalsOf } from "../block_bands.js";
import { BlockMap } from "../block_map.js";
import { Chart } from "../chart.js";
import { requestClass } from "../colours.js";
import { html, useRevision, useState } from "../dom.js";
import { Empty } from "../empty.js";
import { upperBound } from "../history.js";
import { Legend } from "../legend.js";
import { ABSENT, bytes, count, percent, plural, tokens } from "../units.js";

const LEGEND = [
  ["swatch-free", "free"],
  ["swatch-used", "used by one request, in its colour"],
  ["swatch-shared", "shared by prefix: dotted, in its oldest holder's colour"],
  ["swatch-kept", "cached: kept for later, evictable, hatched"],
];
const HOST_LEGEND = [
  ["swatch-host", "in host memory: a frame"],
  ["swatch-moving", "on its way between tiers: a dot"],
];
const DISK_LEGEND = [
  ["swatch-written", "in host memory and on disk: half filled"],
  ["swatch-disk", "on disk: filled"],
];
const MOST_BREAKS = 8;
const MOST_MAPS = 400;

function KvView({ source, mayAct }) {
  const { history, player } = source;
  useRevision(() => `${history.revision} ${Math.round(player.cursor_s() * 4)}`, 4);
  const [group, setGroup] = useState(0);
  const [isWhole, setIsWhole] = useState(false);
  const cursor_s = player.cursor_s();
  const map = history.mapAt(cursor_s);
  if (!map) {
    return html`<div class="card"><h2>KV cache</h2><${Empty} title="No block map yet" mayAct=${mayAct}>
      The map comes when the engine first gives out blocks. A prompt fills many blocks at once; its answer fills one more
      every ${history.hello?.block_size ?? "few"} tokens.
    <//></div>`;
  }
  const chosen = Math.min(group, map.groups.length - 1);
  const totals = deviceTotals(map.groups[chosen]);
  const bands = bandsOf(map, chosen);
  return html`
    <div class="card">
      <div class="card-head">
        <div>
          <h2>Block map</h2>
          <p class="lead">${groupWords(history, chosen, totals)}</p>
        </div>
        <div class="controls">
        <label class="check"><input type="checkbox" checked=${isWhole}
          onChange=${(event) => setIsWhole(event.target.checked)} /> all blocks</label>
        ${
          map.groups.length > 1 &&
          html`<label>Group <select onChange=${(event) => setGroup(Number(event.target.value))}>
          ${map.groups.map((_, index) => html`<option value=${index} selected=${index === chosen}>${groupName(history, index)}</option>`)}
        </select></label>`
        }
        </div>
      </div>
      ${bands.map(
        (band) => html`
        ${bands.length > 1 && html`<h3 class="band">${BANDS[band].title}<span class="note"> ${bandWords(map, band, chosen)}</span></h3>`}
        <${BlockMap} key=${band} history=${history} player=${player} band=${band} group=${chosen} isWhole=${isWhole} />`,
      )}
      <${Legend} rows=${legendOf(bands)} />
      <${Totals} totals=${totals} blockSize=${history.hello?.block_size} />
    </div>
    <div class="pair">
      <${Occupancy} history=${history} player=${player} />
      <div class="stack">
        <${Tiers} tiers=${map.tiers || []} />
        <${Breaks} history=${history} cursor_s=${cursor_s} />
      </div>
    </div>
  `;
}

function deviceTotals(group) {
  const totals = { free: 0, used: 0, shared: 0, cached: 0, ...totalsOf(group.runs) };
  return { ...totals, all: totals.free + totals.used + totals.shared + totals.cached };
}

function legendOf(bands) {
  const beyond = [...(bands.includes("host") ? HOST_LEGEND : []), ...(bands.includes("disk") ? DISK_LEGEND : [])];
  return [...LEGEND, ...beyond];
}

const BAND_STATES = { kept: "kept", written: "kept and on disk too", moving: "on their way", free: "free" };

/** What colours and frames say, in numbers. */
function bandWords(map, band, group) {
  const totals = totalsOf(BANDS[band].runsOf(map, group));
  if (band === "disk") return `${plural(totals.disk, "block")}${map.groups.length > 1 ? " of all groups" : ""}`;
  if (band === "device") return "";
  const parts = Object.entries(BAND_STATES).filter(([state]) => totals[state]);
  return parts.map(([state, words]) => `${count(totals[state])} ${words}`).join(", ");
}

function groupName(history, index) {
  const group = history.hello?.groups?.[index];
  if (!group) return `group ${index}`;
  const window = group.window ? `, window of ${count(group.window)}` : "";
  return `${index}: ${group.content || "kv"}${window}`;
}

function groupWords(history, index, totals) {
  const size = history.hello?.block_size;
  const window = history.hello?.groups?.[index]?.window;
  const words = `${plural(totals.all, "block")} of ${tokens(size)} each, in the order of their numbers.`;
  return window ? `${words} Layers of this group see the last ${tokens(window)}.` : words;
}

function Totals({ totals, blockSize }) {
  const rows = [
    ["free", totals.free],
    ["used by one", totals.used],
    ["shared", totals.shared],
    ["cached, evictable", totals.cached],
  ];
  return html`<dl class="figures">
    ${rows.map(
      ([words, blocks]) => html`<div>
      <dt>${words}</dt>
      <dd>${plural(blocks, "block")}<span class="note"> ${percent(blocks / totals.all)}, ${tokens(blocks * (blockSize || 0))}</span></dd>
    </div>`,
    )}
  </dl>`;
}

function Occupancy({ history, player }) {
  const cursor_s = player.cursor_s();
  const end = upperBound(history.maps, cursor_s, "at_s");
  const maps = history.maps.slice(Math.max(0, end - MOST_MAPS), end);
  const times = maps.map((map) => map.at_s - cursor_s);
  const used = maps.map((map) => map.usedShare * 100);
  const hits = maps.map((map) => (map.hit_rate === null ? null : map.hit_rate * 100));
  return html`<div class="card">
    <h2>Over time</h2>
    <p class="lead">KV in use <strong>${percent(used.length ? used.at(-1) / 100 : null)}</strong>, prefix hits${" "}
      <strong>${hits.at(-1) === null || !hits.length ? ABSENT : percent(hits.at(-1) / 100)}</strong> of the tokens looked up.</p>
    <${Chart}
      label="KV in use and prefix hits over time, in percent"
      data=${[times, used, hits]}
      series=${[
        { label: "KV in use", colour: "decode" },
        { label: "prefix hits", colour: "prefill", dash: [5, 4] },
      ]}
      unit="%"
      range=${[0, 100]}
    />
  </div>`;
}

function Tiers({ tiers }) {
  if (!tiers.length) return null;
  return html`<div class="card"><h2>Tiers</h2><ul class="tiers">
    ${tiers.map(
      (tier) => html`<li>
      <span>${tier.name}</span>
      <meter min="0" max=${tier.capacity} value=${tier.used} aria-label="${tier.name} in use"></meter>
      <span class="note">${plural(tier.blocks ?? 0, "block")}, ${percent(tier.used / tier.capacity)} of ${bytes(tier.capacity)}</span>
    </li>`,
    )}
  </ul></div>`;
}

function Breaks({ history, cursor_s }) {
  const seen = [...history.requests.values()]
    .filter((request) => request.admitted_s !== null && request.admitted_s <= cursor_s && request.promptTokens)
    .slice(-MOST_BREAKS)
    .reverse();
  return html`<div class="card"><h2>Where prefixes broke</h2>
    ${!seen.length && html`<p class="note">Nothing was looked up yet.</p>`}
    <ul class="breaks">
      ${seen.map(
        (request) => html`<li>
        <span class="chip ${requestClass(request.number)}">#${request.number}</span>
        <${PrefixBar} request=${request} />
        <span class="note">${breakWords(request)}</span>
      </li>`,
      )}
    </ul>
  </div>`;
}

function PrefixBar({ request }) {
  const cached = (request.cachedTokens || 0) / request.promptTokens;
  const at = request.prefixBreak ? request.prefixBreak.token_index / request.promptTokens : null;
  return html`<span class="prefix-bar" aria-hidden="true">
    <span class="hit" style=${{ width: `${cached * 100}%` }}></span>
    ${at !== null && html`<span class="break" style=${{ left: `${Math.min(at, 1) * 100}%` }}></span>`}
  </span>`;
}

function breakWords(request) {
  const cached = request.cachedTokens || 0;
  const parts = [
    cached
      ? `${count(cached)} of ${tokens(request.promptTokens)} from the cache`
      : `all ${tokens(request.promptTokens)} read`,
  ];
  const tiers = Object.entries(request.tiers).filter(([, number]) => number);
  if (tiers.length) parts.push(tiers.map(([name, number]) => `${tokens(number)} from ${name}`).join(", "));
  if (request.prefixBreak) {
    const { token_index: index, kind } = request.prefixBreak;
    parts.push(`broke at token ${count(index)}${kind ? ` (${kind})` : ""}`);
  }
  return parts.join("; ");
}

export { KvView };
