// How a plan's numbers belong together. Every number of a formula, and its result, is the server's.

import { html } from "./dom.js";
import { bytes, count, money, plural, rate, seconds } from "./units.js";

const CLOSE = 0.002; // less than three digits show

function Arithmetic({ plan }) {
  return html`<div class="card">
    <h2>The arithmetic</h2>
    <table class="arithmetic">
      <tbody>
        ${rowsOf(plan).map(
          ([name, formula, result]) => html`<tr>
            <th scope="row">${name}</th>
            <td>${formula}</td>
            <td class="result">${result}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** Name, formula and result of each row. */
function rowsOf(plan) {
  return [...memoryRows(plan), ...aloneRows(plan), ...companyRows(plan), ...rooflineRows(plan)];
}

/** An equation only where the server's own numbers satisfy it; elsewhere, in words, what the result depends on. */
function row(name, told, shown, equations, words) {
  const holds = ({ value }) => Math.abs(value - told) <= CLOSE * Math.abs(told);
  const found = equations.find(holds);
  return [name, found ? found.formula : words, shown];
}

function memoryRows({ memory, input_tokens: input, cached_tokens: cached, output_tokens: output }) {
  const { kv_space_bytes: space, kv_bytes_per_token: perToken, kv_bytes_per_user: perUser, max_users: most } = memory;
  const taken = [`${bytes(memory.weight_bytes)} of weights`];
  if (memory.decode_copies_bytes) taken.push(`${bytes(memory.decode_copies_bytes)} of copies for decode`);
  const left = memory.total_bytes - memory.weight_bytes - memory.decode_copies_bytes;
  const spaceWords =
    left >= space
      ? `${bytes(memory.total_bytes)} − ${taken.join(" − ")} − buffers and a reserve`
      : "what weights, buffers and a reserve leave of all devices' memory";
  const whole = {
    formula: `(${count(input)} + ${count(output)}) tokens × ${bytes(perToken)}`,
    value: (input + output) * perToken,
  };
  const unshared = {
    formula: `(${count(input)} − ${count(cached)} shared + ${count(output)}) tokens × ${bytes(perToken)}`,
    value: (input - cached + output) * perToken,
  };
  const prefix = cached ? ", without the prefix that all share" : "";
  return [
    ["Space for KV", spaceWords, bytes(space)],
    row(
      "KV of a user",
      perUser,
      bytes(perUser),
      [whole, unshared],
      `what ${count(input)} + ${count(output)} tokens keep in all layers, some of which keep a window alone${prefix}`,
    ),
    row(
      "Users that fit",
      most,
      plural(most, "user"),
      [{ formula: `${bytes(space)} ÷ ${bytes(perUser)}`, value: Math.floor(space / perUser) }],
      cached
        ? "the space for KV, less one shared prefix, ÷ the KV of a user; no more than may run at a time"
        : "more would fit, but no more than this may run at a time",
    ),
  ];
}

function aloneRows({ alone, efficiency, input_tokens: input, cached_tokens: cached, output_tokens: output }) {
  const read = cached ? `${count(input)} − ${count(cached)} cached tokens` : `${count(input)} tokens`;
  const { ttft, tpot, request } = alone;
  const atShare = ({ floor_s }, share) => ({
    formula: `${seconds(floor_s)} ÷ ${(share * 100).toFixed(share < 0.1 ? 2 : 1)}%`,
    value: floor_s / share,
  });
  const answer = {
    formula: `${seconds(ttft.expected_s)} + (${count(output)} − 1) × ${seconds(tpot.expected_s)}`,
    value: ttft.expected_s + (output - 1) * tpot.expected_s,
  };
  const slower = "the same work at the shares of its speed that a device really reached";
  return [
    ["TTFT at best", `multiply-adds of ${read} ÷ the device's arithmetic a second`, seconds(ttft.floor_s)],
    row(
      "TTFT expected",
      ttft.expected_s,
      seconds(ttft.expected_s),
      [atShare(ttft, efficiency?.prefill_share)],
      slower,
    ),
    ["TPOT at best", "bytes of the weights and of the context ÷ the device's bytes a second", seconds(tpot.floor_s)],
    row("TPOT expected", tpot.expected_s, seconds(tpot.expected_s), [atShare(tpot, efficiency?.decode_share)], slower),
    row("Whole answer", request.expected_s, seconds(request.expected_s), [answer], "TTFT, and a TPOT for each further token"),
  ];
}

function companyRows({ in_company: company, output_tokens: output, usd_per_hour: price }) {
  if (!company) return [];
  const { users, ttft_s, tpot_s, requests_per_s, output_tokens_per_s } = company.expected;
  const served = {
    formula: `${plural(users, "user")} ÷ (${seconds(ttft_s)} + (${count(output)} − 1) × ${seconds(tpot_s)})`,
    value: users / (ttft_s + (output - 1) * tpot_s),
  };
  const written = {
    formula: `${rate(requests_per_s, "requests/s")} × ${count(output)} tokens`,
    value: requests_per_s * output,
  };
  const rows = [
    row(
      "Requests a second",
      requests_per_s,
      rate(requests_per_s, "requests/s"),
      [served],
      `${plural(users, "user")} ÷ the time in which each prompt is read once and each answer written`,
    ),
    row("Throughput", output_tokens_per_s, rate(output_tokens_per_s, "tok/s"), [written], "output tokens of all users"),
  ];
  const cost = company.usd_per_million_output_tokens;
  if (cost !== null && price) {
    const formula = `${money(price)} an hour ÷ 3,600 s ÷ ${rate(output_tokens_per_s, "tok/s")} × 1,000,000 tokens`;
    const paid = { formula, value: ((price / 3600) * 1e6) / output_tokens_per_s };
    rows.push(row("Cost", cost, money(cost), [paid], "the price of all devices ÷ the throughput of all of them"));
  }
  return rows;
}

function rooflineRows({ roofline }) {
  if (!roofline) return [];
  const points = [
    ["prefill", roofline.prefill],
    ["decode alone", roofline.decode_alone],
    ["decode of all users", roofline.decode_in_company],
  ];
  const words = points.filter(([, value]) => value).map(([name, value]) => `${name} ${value.toFixed(1)}`);
  const ridge = `FLOP for each byte read; memory limits below ${roofline.ridge_flops_per_byte.toFixed(1)}, arithmetic above`;
  return [["Intensity", ridge, words.join(", ")]];
}

export { Arithmetic, rowsOf };
