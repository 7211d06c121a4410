// Planner: sliders for a load and a deployment. Every number is the server's: the same cost model as `twostroke plan`.

import { plan, planOptions } from "../api.js";
import { html, useEffect, useState } from "../dom.js";
import { PlanReply } from "../plan_reply.js";
import { bytes, count, money } from "../units.js";

const WAIT_MS = 60;
const SLIDERS = [
  { name: "input", title: "Prompt", unit: "tokens", least: 16, most: 131072 },
  { name: "output", title: "Answer", unit: "tokens", least: 1, most: 16384 },
  { name: "users", title: "Users at once (batch)", unit: "users", least: 1, most: 1024, absent: "as many as fit" },
  { name: "cached", title: "Of the prompt, cached", unit: "tokens", least: 0, most: 131072 },
  { name: "tensor_parallel", title: "Devices to a copy", unit: "", values: [1, 2, 4, 8] },
];
const FIRST_MODEL = "Llama-3.1-8B"; // large enough that a plan says something
const START = { input: 2000, output: 500, users: 16, cached: 0, tensor_parallel: 1, drafts: 4 };

function PlannerView() {
  const [options, setOptions] = useState(null);
  const [question, setQuestion] = useState(null);
  const [reply, setReply] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [answered, setAnswered] = useState(null); // the question that the latest reply, or refusal, is of

  useEffect(() => {
    planOptions()
      .then((found) => {
        setOptions(found);
        setQuestion(firstQuestion(found));
      })
      .catch((error) => setTrouble(error.message));
  }, []);
  useEffect(() => {
    if (!question) return undefined;
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const next = await plan(question, stop.signal);
        setReply({ question, plan: next });
        setTrouble("");
      } catch (error) {
        if (error.name === "AbortError") return;
        setTrouble(error.message);
      }
      setAnswered(question);
    }, WAIT_MS);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [question]);

  if (!options || !question) {
    const words = trouble || "Asking the server what it knows.";
    return html`<div class="card"><h2>Planner</h2><p class=${trouble ? "trouble" : "note"}>${words}</p></div>`;
  }
  const set = (name, value) => setQuestion({ ...question, [name]: value });
  return html`<div class="planner">
    <form class="card" onSubmit=${(event) => event.preventDefault()}>
      <h2>Planner</h2>
      <p class="lead">Move a slider: the server plans anew, by the cost model that its engine uses.</p>
      <${Choices} options=${options} question=${question} set=${set} />
      ${SLIDERS.map((slider) => html`<${Slider} key=${slider.name} ...${slider} value=${question[slider.name]} set=${set} />`)}
      <${Drafts} question=${question} setQuestion=${setQuestion} />
    </form>
    <div class="stack" aria-busy=${answered !== question}>
      ${trouble && html`<p class="card trouble" role="alert">${trouble}</p>`}
      ${reply && html`<${PlanReply} question=${reply.question} plan=${reply.plan} />`}
    </div>
  </div>`;
}

function firstQuestion(options) {
  const given = options.defaults || {};
  const model =
    options.models.find((name) => name === (given.model || FIRST_MODEL)) || options.served || options.models[0];
  const known = (name) => given[name] ?? START[name] ?? null;
  return {
    model,
    on: (options.devices.find(({ name }) => plain(name) === plain(given.on || "")) || options.devices[0]).name,
    quantise: null,
    kv: known("kv"),
    input: known("input"),
    output: known("output"),
    users: START.users,
    cached: known("cached"),
    tensor_parallel: known("tensor_parallel"),
    accept: null,
    drafts: null,
  };
}

/** The command takes h200 for H200, and so do its defaults. */
const plain = (name) => name.toLowerCase().replace(/\W/g, "");

function Choices({ options, question, set }) {
  const choice = (name, title, rows) => html`<label>${title}
    <select name=${name} onChange=${(event) => set(name, event.target.value || null)}>
      ${rows.map(
        ([value, words]) => html`<option value=${value ?? ""} selected=${value === question[name]}>${words}</option>`,
      )}
    </select></label>`;
  const devices = options.devices.map((device) => [device.name, deviceWords(device)]);
  return html`<div class="fields">
    ${choice(
      "model",
      "Model",
      options.models.map((name) => [name, name]),
    )}
    ${choice("on", "Device", devices)}
    ${choice("quantise", "Weights", [[null, "as stored"], ...options.quantise.map((name) => [name, name])])}
    ${choice(
      "kv",
      "KV cache",
      options.kv.map((name) => [name, name]),
    )}
  </div>`;
}

function deviceWords(device) {
  const parts = [device.label || device.name];
  if (device.memory_bytes) parts.push(bytes(device.memory_bytes));
  if (device.price_per_hour_usd) parts.push(`${money(device.price_per_hour_usd)}/h`);
  return parts.join(" · ");
}

/** Long ranges move by their logarithm: 16 to 131,072 on one slider. */
function Slider({ name, title, unit, least, most, values, absent, value, set }) {
  const [from, until] = values ? [0, values.length - 1] : [0, 400];
  const toValue = (place) => {
    if (values) return values[place];
    const exact = Math.expm1((place / until) * (Math.log1p(most) - Math.log1p(least)) + Math.log1p(least));
    return Math.min(Math.max(rounded(exact), least), most);
  };
  const toPlace = (number) => {
    if (values) return Math.max(values.indexOf(number), 0);
    return Math.round(((Math.log1p(number) - Math.log1p(least)) / (Math.log1p(most) - Math.log1p(least))) * until);
  };
  // Its own place, since several places round to one number and it must not stick there.
  const [place, setPlace] = useState(() => toPlace(value ?? most));
  const move = (event) => {
    setPlace(Number(event.target.value));
    set(name, toValue(Number(event.target.value)));
  };
  const leave = (event) => {
    setPlace(toPlace(START[name]));
    set(name, event.target.checked ? null : START[name]);
  };
  const words = value === null ? absent : `${count(value)} ${unit}`;
  return html`<div class="slider">
    <label for="plan-${name}">${title}</label>
    <input id="plan-${name}" type="range" min=${from} max=${until} value=${place} disabled=${value === null}
      aria-valuetext=${words} onInput=${move} />
    <output for="plan-${name}">${words}</output>
    ${
      absent &&
      html`<label class="check"><input type="checkbox" checked=${value === null}
      onChange=${leave} /> ${absent}</label>`
    }
  </div>`;
}

/** To three digits that matter, so that a slider gives numbers that people name. */
function rounded(value) {
  if (value < 100) return Math.round(value);
  const power = 10 ** (Math.floor(Math.log10(value)) - 2);
  return Math.round(value / power) * power;
}

function Drafts({ question, setQuestion }) {
  const isOn = question.accept !== null;
  const toggle = (event) =>
    setQuestion({ ...question, accept: event.target.checked ? 0.7 : null, drafts: event.target.checked ? 4 : null });
  return html`<fieldset class="drafts">
    <legend><label class="check">
      <input type="checkbox" name="speculation" checked=${isOn} onChange=${toggle} /> Speculation
    </label></legend>
    <div class="slider">
      <label for="plan-accept">Chance that a draft holds</label>
      <input id="plan-accept" type="range" min="0.05" max="0.95" step="0.05" value=${question.accept ?? 0.7} disabled=${!isOn}
        onInput=${(event) => setQuestion({ ...question, accept: Number(event.target.value) })} />
      <output for="plan-accept">${isOn ? `${Math.round(question.accept * 100)}%` : "off"}</output>
    </div>
    <div class="slider">
      <label for="plan-drafts">Drafts a step</label>
      <input id="plan-drafts" type="range" min="1" max="8" value=${question.drafts ?? 4} disabled=${!isOn}
        onInput=${(event) => setQuestion({ ...question, drafts: Number(event.target.value) })} />
      <output for="plan-drafts">${isOn ? `${question.drafts} drafts` : "off"}</output>
    </div>
  </fieldset>`;
}

export { PlannerView };
