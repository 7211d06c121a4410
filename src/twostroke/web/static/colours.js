// Which colour says what. The values live in page.css, so that light and dark have their own; here are their names.
// A request keeps its colour in every view. The two phases have two hues that no request uses alone for its meaning:
// wherever colour tells a phase, a pattern or a word tells it too.

const REQUEST_COLOURS = 12;

let cached = null;

/** All colours of the present theme, read once from the style sheet. */
function theme() {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  cached = {
    ink: value("--ink"),
    soft: value("--ink-soft"),
    line: value("--line"),
    faint: value("--line-faint"),
    surface: value("--surface"),
    ground: value("--ground"),
    prefill: value("--prefill"),
    decode: value("--decode"),
    queue: value("--queue"),
    interference: value("--interference"),
    alarm: value("--alarm"),
    good: value("--good"),
    focus: value("--focus"),
    free: value("--free"),
    kept: value("--kept"),
    requests: Array.from({ length: REQUEST_COLOURS }, (_, index) => value(`--request-${index}`)),
    font: `12px ${value("--font-text")}`,
    smallFont: `11px ${value("--font-text")}`,
  };
  return cached;
}

/** Call after the theme was switched. */
function forgetTheme() {
  cached = null;
}

function requestColour(request) {
  const colours = theme().requests;
  return colours[((request % colours.length) + colours.length) % colours.length];
}

/** The class that colours an element as this request. */
function requestClass(request) {
  return `request-${((request % REQUEST_COLOURS) + REQUEST_COLOURS) % REQUEST_COLOURS}`;
}

export { forgetTheme, requestClass, requestColour, theme };
