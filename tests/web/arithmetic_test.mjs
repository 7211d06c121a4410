// Reads plans (a JSON array) from its input, and checks each row of the planner's arithmetic as a reader with a pocket
// calculator would: a formula of numbers alone is worked out from its text, and has to come to the result beside it.
// Prints, for each plan, the names of the rows that were worked out.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const static_ = new URL("../../src/twostroke/web/static/", import.meta.url);
const { rowsOf } = await import(new URL("plan_arithmetic.js", static_));

const UNITS = { TB: 1e12, GB: 1e9, MB: 1e6, kB: 1e3, B: 1, min: 60, s: 1, ms: 1e-3, µs: 1e-6, "%": 0.01 };
const SILENT = /\b(tokens?|users?|requests\/s|tok\/s|USD|an hour|shared)\b/g;
const ROUNDING = 0.02; // numbers of three digits, several of them

function workedOut(text) {
  const units = new RegExp(`([0-9.]+) ?(${Object.keys(UNITS).join("|")})(?![A-Za-z])`, "g");
  const plain = text
    .replaceAll(",", "")
    .replace(SILENT, "")
    .replace(units, (_, number, unit) => `(${number}*${UNITS[unit]})`)
    .replaceAll("×", "*")
    .replaceAll("÷", "/")
    .replaceAll("−", "-");
  return /^[-+*/().0-9e\s]+$/.test(plain) ? Function(`return ${plain}`)() : null;
}

const names = JSON.parse(readFileSync(0, "utf8")).map((plan) => {
  const checked = [];
  for (const [name, formula, result] of rowsOf(plan)) {
    const value = workedOut(formula);
    if (value === null) continue;
    const told = workedOut(result);
    const slack = name === "Users that fit" ? 1 : 0; // a whole number, rounded down
    const rounding = name === "Cost" ? 0.0006 : 0;
    const off = Math.abs(value - told);
    assert.ok(off <= ROUNDING * told + slack + rounding, `${plan.model}: ${name}: ${formula} is ${value}, not ${result}`);
    checked.push(name);
  }
  return checked;
});
console.log(JSON.stringify(names));
