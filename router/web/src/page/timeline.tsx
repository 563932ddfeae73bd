// A chart for each worker: tokens that wait for prefill, tokens in contexts that decode, blocks in its cache.

import uPlot from "uplot";
import { accepted, viewOf, type LabRun, type Model } from "../oracle/replay.ts";
import type { Trace } from "../oracle/trace.ts";
import { axis, Chart, type Ink } from "./chart.tsx";
import { count } from "./format.ts";
import type { Scene } from "./scenes.ts";

interface Lane {
  times: number[];
  queued: number[];
  context: number[];
  cache: number[];
  arrivals: { at: number; id: string }[];
}

/** The state of one worker at every time at which it changes. */
export function laneOf(trace: Trace, model: Model, run: LabRun, place: number, scene: Scene): Lane {
  const own = run.bookings.filter((one) => one.worker === place);
  const heard = trace.events.filter((one) => one.worker === place);
  const stops = new Set([scene.from, scene.to]);
  for (const one of own) {
    for (const at of [one.request?.tick ?? one.start, one.firstByte, one.end]) stops.add(at);
    // A context grows while it decodes; a few points draw the slope.
    for (let part = 1; part < 8; part += 1) stops.add(Math.round(one.firstByte + ((one.end - one.firstByte) * part) / 8));
  }
  for (const event of heard) stops.add(event.tick);
  const times = [...stops].filter((at) => at >= scene.from && at <= scene.to).sort((a, b) => a - b);
  const worker = trace.workers[place];
  const at = (now: number) => {
    const live = own.filter((one) => (one.request?.tick ?? one.start) <= now && now < Math.max(one.end, one.firstByte));
    const waiting = live.filter((one) => now < one.firstByte);
    const decoding = live.filter((one) => now >= one.firstByte);
    const made = (from: number, limit: number) => Math.min(limit, Math.floor((now - from) / model.ticks_per_decode_token));
    const due = { tick: now, seq: (1n << 64n) - 1n };
    const held = worker ? viewOf(worker, accepted(trace, place, due).kept) : new Map<string, Set<string>>();
    return {
      queued: waiting.reduce((sum, one) => sum + one.uncached, 0),
      context: decoding.reduce((sum, one) => sum + one.prompt + made(one.firstByte, one.decode), 0),
      cache: [...held.values()].reduce((sum, blocks) => sum + blocks.size, 0),
    };
  };
  const states = times.map(at);
  return {
    times,
    queued: states.map((one) => one.queued),
    context: states.map((one) => one.context),
    cache: states.map((one) => one.cache),
    arrivals: own.flatMap((one) => (one.request ? [{ at: one.request.tick, id: one.request.id }] : [])),
  };
}

export function Timeline(props: {
  trace: Trace;
  model: Model;
  run: LabRun;
  scene: Scene;
  selected: string | null;
  theme: string;
}) {
  const { trace, model, run, scene, selected, theme } = props;
  const lanes = trace.workers.map((_, place) => laneOf(trace, model, run, place, scene));
  const top = Math.max(10, ...lanes.flatMap((lane) => [...lane.queued, ...lane.context]));
  const blocks = Math.max(4, ...lanes.flatMap((lane) => lane.cache));
  return (
    <div class="lanes">
      {trace.workers.map((worker, place) => {
        const lane = lanes[place] as Lane;
        const peak = (values: number[]) => count(Math.max(0, ...values));
        const label = `${worker.name}: ${lane.arrivals.length} requests; at most ${peak(lane.queued)} tokens queued, ${peak(lane.context)} tokens in decode, ${peak(lane.cache)} blocks cached`;
        return (
          <div class="lane" key={worker.name}>
            <h3 class="mono name" title={worker.name}>{worker.name}</h3>
            <Chart
              label={label}
              height={place === trace.workers.length - 1 ? 132 : 108}
              theme={theme}
              data={[lane.times, lane.queued, lane.context, lane.cache]}
              version={`${run.policy} ${scene.key} ${selected} ${top} ${blocks} ${lane.times.join()} ${lane.queued.join()}`}
              options={(ink) => optionsOf(ink, lane, scene, top, blocks, selected, place === trace.workers.length - 1)}
            />
          </div>
        );
      })}
    </div>
  );
}

function optionsOf(ink: Ink, lane: Lane, scene: Scene, top: number, blocks: number, selected: string | null, isLast: boolean) {
  const stepped = uPlot.paths.stepped?.({ align: 1 });
  const line = (label: string, stroke: string, scale: string, unit: string, fill?: string): uPlot.Series => ({
    label,
    stroke,
    scale,
    width: 1.5,
    ...(fill ? { fill } : { dash: [4, 3] }),
    ...(stepped ? { paths: stepped } : {}),
    points: { show: false },
    value: (_, value) => (value === null ? "–" : `${count(value)} ${unit}`),
  });
  return {
    scales: {
      x: { time: false, range: (): [number, number] => [scene.from, scene.to] },
      y: { range: (): [number, number] => [0, top * 1.1] },
      blocks: { range: (): [number, number] => [0, blocks * 1.25] },
    },
    cursor: { sync: { key: "lanes" }, y: false, drag: { x: false, y: false } },
    axes: [
      axis(ink, { values: (_: uPlot, at: number[]) => at.map((one) => `${count(one)}`), ...(isLast ? { label: "time, ms", labelSize: 20 } : {}), size: 24 }),
      axis(ink, { label: "tokens", size: 46 }),
      axis(ink, { label: "blocks", scale: "blocks", side: 1, size: 36, grid: { show: false } }),
    ],
    series: [
      { label: "time", value: (_: uPlot, value: number | null) => (value === null ? "–" : `${count(value)} ms`) },
      line("prefill queue", ink.warm, "y", "tokens", `${ink.warm}33`),
      line("decode", ink.cool, "y", "tokens", `${ink.cool}22`),
      line("cache", ink.muted, "blocks", "blocks"),
    ],
    hooks: { draw: [(plot: uPlot) => arrivals(plot, lane, scene, selected, ink)] },
    padding: [6, 4, 0, 0] as [number, number, number, number],
  };
}

/** A tick where a request arrived; the opened one goes through. */
function arrivals(plot: uPlot, lane: Lane, scene: Scene, selected: string | null, ink: Ink): void {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.setLineDash([]);
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  for (const { at, id } of lane.arrivals) {
    if (at < scene.from || at > scene.to) continue;
    const x = plot.valToPos(at, "x", true);
    const opened = id === selected;
    ctx.strokeStyle = ctx.fillStyle = opened ? ink.accent : ink.text;
    ctx.lineWidth = (opened ? 2 : 1) * ratio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + (opened ? bbox.height : 7 * ratio));
    ctx.stroke();
    if (opened) {
      ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
      ctx.fillText(id.slice(0, 16), x + 5 * ratio, bbox.top + 12 * ratio);
    }
  }
  ctx.restore();
}
