// A plan as the server gave it. Nothing is computed here.

import { html } from "./dom.js";
import { Arithmetic } from "./plan_arithmetic.js";
import { count, money, percent, plural, rate, seconds } from "./units.js";

const outputRate = (value) => rate(value, "tok/s");

function PlanReply({ question, plan }) {
  const company = plan.in_company?.expected;
  return html`
    <div class="card">
      <h2>${plan.model} on ${plan.devices > 1 ? `${plan.devices} × ` : ""}${plan.device}</h2>
      <${Fits} memory=${plan.memory} />
      <div class="big">
        ${figuresAlone(plan).map((figure) => html`<${Figure} key=${figure.path} plan=${plan} ...${figure} />`)}
        ${company && figuresInCompany(plan).map((figure) => html`<${Figure} key=${figure.path} plan=${plan} ...${figure} />`)}
      </div>
    </div>
    ${plan.memory.max_users > 0 && html`<${Arithmetic} plan=${plan} />`}
    <${Advice} question=${question} plan=${plan} />
  `;
}

function Fits({ memory }) {
  if (memory.max_users > 0) {
    return html`<p class="fits kept">✓ It fits: KV for ${plural(memory.max_users, "user")} at once.</p>`;
  }
  return html`<p class="fits broken">✗ It does not fit: ${plural(memory.devices_needed, "device")} would be needed.</p>`;
}

function figuresAlone(plan) {
  const { ttft, tpot } = plan.alone;
  return [
    { path: "alone.ttft.expected_s", name: "TTFT alone", kind: "prefill", note: `floor ${seconds(ttft.floor_s)}` },
    { path: "alone.tpot.expected_s", name: "TPOT alone", kind: "decode", note: `floor ${seconds(tpot.floor_s)}` },
    { path: "alone.request.expected_s", name: "whole answer alone", note: `${count(plan.output_tokens)} tokens` },
  ];
}

function figuresInCompany(plan) {
  const { users, requests_per_s: requestRate } = plan.in_company.expected;
  const crowd = plural(users, "user");
  const throughput = "in_company.expected.output_tokens_per_s";
  return [
    { path: "in_company.expected.ttft_s", name: `TTFT of ${crowd}`, kind: "prefill", note: "mean" },
    { path: "in_company.expected.tpot_s", name: `TPOT of ${crowd}`, kind: "decode", note: "mean" },
    { path: throughput, name: "throughput", words: outputRate, note: rate(requestRate, "requests/s") },
    {
      path: "in_company.usd_per_million_output_tokens",
      name: "a million output tokens",
      words: money,
      note: plan.usd_per_hour ? `${money(plan.usd_per_hour)} an hour` : "no price is known",
    },
  ];
}

function at(plan, path) {
  return path.split(".").reduce((value, name) => value?.[name], plan) ?? null;
}

/** `data-value` has every digit of it. */
function Figure({ path, name, words = seconds, plan, kind, note }) {
  const value = at(plan, path);
  return html`<div class="figure ${kind ? `of-${kind}` : ""}">
    <span class="figure-name">${name}</span>
    <span class="figure-value" data-path=${path} data-value=${value} title=${value}>${words(value)}</span>
    <span class="note">${note}</span>
  </div>`;
}

function Advice({ question, plan }) {
  const { efficiency } = plan;
  const lines = [...(plan.advice || []), ...(plan.notes || [])];
  return html`<div class="card">
    <h2>${plan.bound ? `Bound by ${plan.bound}` : "Notes"}</h2>
    <ul class="advice">
      ${lines.map((line) => html`<li>${line}</li>`)}
    </ul>
    ${
      efficiency &&
      html`<p class="note">
      Expected is ${percent(efficiency.prefill_share)} of the floor's pace in prefill and
      ${" "}${percent(efficiency.decode_share)} in decode, as reached on ${efficiency.source}. Error: ${efficiency.error}
    </p>`
    }
    <details>
      <summary>The same from a terminal, and every digit</summary>
      <pre tabindex="0">${commandLine(question)}</pre>
      <pre tabindex="0" class="json">${JSON.stringify(plan, null, 2)}</pre>
    </details>
  </div>`;
}

function commandLine(question) {
  const words = ["twostroke plan", quoted(question.model)];
  for (const [name, value] of Object.entries(question)) {
    if (name === "model" || value === null || value === undefined) continue;
    words.push(`--${name.replaceAll("_", "-")} ${quoted(value)}`);
  }
  return `${words.join(" ")} --json`;
}

function quoted(value) {
  return /^[\w.,/:+-]+$/.test(String(value)) ? String(value) : `"${value}"`;
}

export { PlanReply };
