// The Pareto plane of one decision: reuse upwards, work after assignment to the right. Better is up and left.

import uPlot from "uplot";
import { axis, Chart, type Ink } from "./chart.tsx";
import { isStale, total, workAfter, type Candidate, type Decision } from "./decision_model.ts";
import { count, plural, worker } from "./format.ts";

interface Point {
  one: Candidate;
  x: number;
  y: number;
  /** A stale view's claim stands at what it claims, dotted. */
  kind: "chosen" | "open" | "dominated" | "rejected" | "claim";
}

/** Names are drawn for so many points at most; a fleet of thousands is a cloud. */
const MAX_NAMES = 16;

export function pointsOf(decision: Decision): Point[] {
  return decision.candidates.flatMap((one) => {
    const x = workAfter(decision, one);
    const kind =
      one.target === decision.chosen
        ? "chosen"
        : one.rejection !== null
          ? "rejected"
          : one.dominatedBy !== null
            ? "dominated"
            : "open";
    const own: Point = { one, x, y: total(one.hits) * decision.blockSize, kind };
    const claimed = total(one.claimed) * decision.blockSize;
    return isStale(one) ? [own, { one, x, y: claimed, kind: "claim" as const }] : [own];
  });
}

export function Plane({ decision, theme }: { decision: Decision; theme: string }) {
  const points = pointsOf(decision);
  const xs = points.map((one) => one.x);
  const ys = points.map((one) => one.y);
  const span = (values: number[], least: number): [number, number] => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = Math.max(least, (high - low) * 0.14);
    return [low - room, high + room];
  };
  const xRange = points.length ? span(xs, Math.max(10, decision.prompt * 0.1)) : ([0, 1] as [number, number]);
  const yRange = points.length
    ? ([-Math.max(decision.prompt, 1) * 0.08, Math.max(decision.prompt, ...ys) * 1.1] as [number, number])
    : ([0, 1] as [number, number]);
  const version = `${decision.id} ${decision.policy} ${decision.at} ${points.map((p) => `${p.x},${p.y},${p.kind}`).join(" ")}`;
  const options = (ink: Ink) => ({
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { time: false, range: () => xRange },
      y: { range: () => yRange },
    },
    axes: [
      axis(ink, { label: "work after assignment, tokens (less is better)" }),
      axis(ink, { label: "reuse, tokens (more is better)", size: 52, labelGap: 0 }),
    ],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: { draw: [(plot: uPlot) => draw(plot, points, ink)] },
    padding: [8, 12, 0, 0] as [number, number, number, number],
  });
  const spoken = `Reuse against work after assignment for ${plural(decision.candidates.length, "candidate")}; the table before it has the numbers.`;
  return <Chart label={spoken} height={300} data={[[0], [null]]} options={options} version={version} theme={theme} />;
}

function draw(plot: uPlot, points: Point[], ink: Ink): void {
  const { ctx } = plot;
  const ratio = devicePixelRatio || 1;
  const at = (point: Point): [number, number] => [
    plot.valToPos(point.x, "x", true),
    plot.valToPos(point.y, "y", true),
  ];
  ctx.save();
  ctx.lineWidth = 1.5 * ratio;
  frontier(plot, points, ink, ratio);
  const radius = (points.length > 200 ? 3 : 6) * ratio;
  for (const point of points) {
    const [x, y] = at(point);
    const colour = { chosen: ink.accent, open: ink.text, dominated: ink.muted, rejected: ink.bad, claim: ink.warm };
    ctx.strokeStyle = ctx.fillStyle = colour[point.kind];
    ctx.setLineDash(point.kind === "claim" ? [2 * ratio, 2.5 * ratio] : []);
    ctx.beginPath();
    if (point.kind === "rejected") {
      for (const [dx, dy] of [[1, 1], [1, -1]] as const) {
        ctx.moveTo(x - dx * radius * 0.8, y - dy * radius * 0.8);
        ctx.lineTo(x + dx * radius * 0.8, y + dy * radius * 0.8);
      }
    } else {
      ctx.arc(x, y, radius * (point.kind === "chosen" ? 1.2 : point.kind === "claim" ? 1.75 : 1), 0, 2 * Math.PI);
    }
    if (point.kind === "chosen") ctx.fill();
    ctx.stroke();
  }
  ctx.setLineDash([]);
  if (points.length <= MAX_NAMES) names(plot, points, ink, ratio, at);
  ctx.restore();
}

/** The stair through the points that nobody dominates. */
function frontier(plot: uPlot, points: Point[], ink: Ink, ratio: number): void {
  const best = points
    .filter((point) => point.kind !== "claim" && point.one.dominatedBy === null)
    .sort((a, b) => a.x - b.x || a.y - b.y);
  if (best.length < 2) return;
  const { ctx } = plot;
  ctx.strokeStyle = ink.grid;
  ctx.lineWidth = 2 * ratio;
  ctx.beginPath();
  best.forEach((point, place) => {
    const [x, y] = [plot.valToPos(point.x, "x", true), plot.valToPos(point.y, "y", true)];
    if (place === 0) ctx.moveTo(x, y);
    else {
      const before = best[place - 1] as Point;
      ctx.lineTo(x, plot.valToPos(before.y, "y", true));
      ctx.lineTo(x, y);
    }
  });
  ctx.stroke();
  ctx.lineWidth = 1.5 * ratio;
}

/** Names beside points; those of one place share a line. */
function names(plot: uPlot, points: Point[], ink: Ink, ratio: number, at: (point: Point) => [number, number]): void {
  const { ctx } = plot;
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  const places = new Map<string, Point[]>();
  for (const point of points) {
    const key = `${point.x} ${point.y}`;
    places.set(key, [...(places.get(key) ?? []), point]);
  }
  const taken: { left: number; right: number; y: number }[] = [];
  for (const group of places.values()) {
    const [x, y] = at(group[0] as Point);
    const said = (point: Point) => {
      const name = worker(point.one.target);
      const cut = name.length > 24 ? `${name.slice(0, 23)}…` : name;
      return point.kind === "claim" ? `${cut} claims ${count(point.y)}` : cut;
    };
    const label = group.map(said).join(", ");
    const width = ctx.measureText(label).width;
    const right = plot.bbox.left + plot.bbox.width;
    const left = x + 12 * ratio + width > right ? x - 12 * ratio - width : x + 12 * ratio;
    let line = y;
    const clashes = () =>
      taken.some((one) => Math.abs(one.y - line) < 14 * ratio && left < one.right && left + width > one.left);
    for (let tries = 0; clashes() && tries < 8; tries += 1) line -= 15 * ratio;
    taken.push({ left, right: left + width, y: line });
    ctx.fillStyle = group.some((point) => point.kind === "chosen") ? ink.text : ink.muted;
    ctx.fillText(label, left, line);
  }
}
