// Lines over time (uPlot), in the page's colours, with a table for those who cannot see them.

import uPlot from "./vendor/uplot.js";
import { theme } from "./colours.js";
import { html, useEffect, useRef } from "./dom.js";

const HEIGHT = 240;

/** `data`: the times in seconds from now, and one array a series. */
function Chart({ label, data, series, unit, range }) {
  const place = useRef(null);
  const chart = useRef(null);
  const dress = useRef(null);
  useEffect(() => {
    const colours = theme();
    if (!chart.current || dress.current !== colours) {
      chart.current?.destroy();
      dress.current = colours;
      chart.current = new uPlot(options(colours, series, unit, range, place.current.clientWidth), data, place.current);
    } else {
      chart.current.setData(data);
    }
  }, [data]);
  useEffect(() => {
    const watcher = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && chart.current && width !== chart.current.width) chart.current.setSize({ width, height: HEIGHT });
    });
    watcher.observe(place.current);
    return () => {
      watcher.disconnect();
      chart.current?.destroy();
      chart.current = null;
    };
  }, []);
  return html`<figure class="chart" role="img" aria-label=${label}><div ref=${place}></div></figure>`;
}

function options(colours, series, unit, range, width) {
  const axis = {
    stroke: colours.soft,
    font: colours.smallFont,
    grid: { stroke: colours.faint, width: 1 },
    ticks: { show: false },
  };
  return {
    width: width || 320,
    height: HEIGHT,
    cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    legend: { live: false }, // what the lines are; the figures of the moment stand above them
    scales: { x: { time: false }, y: { range } },
    axes: [
      { ...axis, values: (_, values) => values.map((value) => `${value} s`) },
      { ...axis, size: 52, values: (_, values) => values.map((value) => `${value}${unit}`) },
    ],
    series: [
      { label: "time", value: (_, value) => (value === null ? "–" : `${value.toFixed(1)} s`) },
      ...series.map((one) => ({
        label: one.label,
        stroke: colours[one.colour],
        dash: one.dash,
        width: 2,
        points: { show: false },
        value: (_, value) => (value === null || value === undefined ? "–" : `${value.toFixed(1)}${unit}`),
      })),
    ],
  };
}

export { Chart };
