// The tiers that KV blocks lie in, each a band of the block map: the device, host memory, the disk. What a map says of
// each, and in which words. Draws nothing.

const BANDS = {
  device: { title: "On the device", cell: "Block", runsOf: (map, group) => map.groups[group].runs },
  host: { title: "In host memory", cell: "Slot", runsOf: (map, group) => map.groups[group].host || [] },
  disk: { title: "On disk", cell: "Block on disk", runsOf: (map) => onDisk(map) },
};

/** A folder has no places: all that can be found there, one block after the other, of all groups. */
function onDisk({ tiers }) {
  const blocks = tiers?.find(({ name }) => name === "disk")?.blocks || 0;
  return blocks ? [[0, blocks, "disk", -1]] : [];
}

/** The names of those that a map has of this group; the device is always there. */
function bandsOf(map, group) {
  return Object.keys(BANDS).filter((name) => name === "device" || BANDS[name].runsOf(map, group).length > 0);
}

/** How many blocks or slots there are. */
function sizeOf(runs) {
  const last = runs.at(-1);
  return last ? last[0] + last[1] : 0;
}

/** How many there are from the first to the last one that is not free. */
function touchedOf(runs) {
  const [first, blocks] = runs.findLast((run) => run[2] !== "free") || [0, 0];
  return first + blocks;
}

/** By state: how many. */
function totalsOf(runs) {
  const totals = {};
  for (const [, blocks, state] of runs) totals[state] = (totals[state] || 0) + blocks;
  return totals;
}

const STATE_WORDS = {
  free: "free",
  used: "used by",
  shared: "shared, held first by",
  cached: "cached, evictable",
  kept: "kept in host memory",
  written: "kept in host memory, and on disk too",
  moving: "on its way between tiers",
  disk: "can be found again, also after a restart",
};

/** Of several blocks in one cell the one that comes first here counts. */
const ORDER = ["used", "shared", "moving", "kept", "written", "cached", "disk", "free"];

export { BANDS, ORDER, STATE_WORDS, bandsOf, sizeOf, totalsOf, touchedOf };
