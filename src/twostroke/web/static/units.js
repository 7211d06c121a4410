// Numbers as people read them: three digits that matter, and always a unit.

const ABSENT = "–";

function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  if (size < 1) return value.toPrecision(3);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function scaled(value, steps) {
  for (const [least, unit] of steps) {
    if (Math.abs(value) >= least) return `${digits(value / least)} ${unit}`;
  }
  const [least, unit] = steps[steps.length - 1];
  return `${digits(value / least)} ${unit}`;
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 12.3 ms, 1.20 s, 450 µs */
function seconds(value) {
  if (!known(value)) return ABSENT;
  if (value === 0) return "0 ms";
  if (value >= 120) return `${digits(value / 60)} min`;
  return scaled(value, [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "µs"],
  ]);
}

function bytes(value) {
  return known(value)
    ? scaled(value, [
        [1e12, "TB"],
        [1e9, "GB"],
        [1e6, "MB"],
        [1e3, "kB"],
        [1, "B"],
      ])
    : ABSENT;
}

function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : ABSENT;
}

function tokens(value) {
  return known(value) ? `${count(value)} ${Math.round(value) === 1 ? "token" : "tokens"}` : ABSENT;
}

function rate(value, unit) {
  if (!known(value)) return ABSENT;
  return value >= 1000 ? `${count(value)} ${unit}` : `${digits(value)} ${unit}`;
}

function percent(share) {
  if (!known(share)) return ABSENT;
  return `${share > 0 && share < 0.1 ? (share * 100).toFixed(1) : (share * 100).toFixed(0)}%`;
}

function operations(value) {
  return known(value)
    ? `${scaled(value, [
        [1e15, "P"],
        [1e12, "T"],
        [1e9, "G"],
        [1e6, "M"],
        [1, ""],
      ])}FLOP/s`
    : ABSENT;
}

function money(value) {
  if (!known(value)) return ABSENT;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(value >= 1 ? 2 : 3)} USD`;
}

/** A span of a timeline, as on a clock: 1:05 or 0:07.3 */
function clock(value) {
  if (!known(value)) return ABSENT;
  const minutes = Math.floor(value / 60);
  const rest = (value - minutes * 60).toFixed(1).padStart(4, "0");
  return `${minutes}:${rest}`;
}

function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export { ABSENT, bytes, clock, count, known, money, operations, percent, plural, rate, seconds, tokens };
